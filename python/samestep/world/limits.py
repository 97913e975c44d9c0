"""The limits of this machine: memory, processors, descriptors; and the hosts that a batch system allotted."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep._util import cpus, launchers
from samestep._util.text import size
from samestep.arrays.numpy_memory import available_memory, usable_memory

_LITTLE_SHM = 256 << 20  # the default of containers is 64 MiB, less than NCCL and data loaders need
_MIN_DESCRIPTORS = 1024


def examine(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> dict[str, Any]:
    """Facts in bytes and counts; None for what has no limit or cannot be found out."""
    shm = _file_system(root / "dev/shm")
    return {
        "shm": shm,
        "memlock": _limit(resource.RLIMIT_MEMLOCK),
        "nofile": {"soft": _limit(resource.RLIMIT_NOFILE), "hard": _limit(resource.RLIMIT_NOFILE, hard=True)},
        "memory": {"usable": usable_memory(root), "available": available_memory(root)},
        "cpus": cpus.usable_cpus(root),
        "cpu_quota": cpus.cpu_quota(root),
        "hosts": hosts(env),
    }


def rows(found: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> list[tuple[str, str, bool | None]]:
    """What `examine` returned, as rows of `samestep doctor`. Pure."""
    shm, memory, nofile, quota = found["shm"], found["memory"], found["nofile"], found["cpu_quota"]
    few = nofile["soft"] is not None and nofile["soft"] < _MIN_DESCRIPTORS
    few_text = "; raise it with ulimit -n, for a rank has connections to all others"
    little = shm is not None and shm["total"] < _LITTLE_SHM
    little_text = "; NCCL and data loaders may need more: docker run --shm-size=1g" if little else ""
    shm_text = f"{size(shm['free'])} free of {size(shm['total'])}{little_text}" if shm else "there is none"
    limited = f"{quota:g} CPUs by the control group" if quota else "none"
    return [
        ("memory", f"{size(memory['available'])} available of {size(memory['usable'])} usable", None),
        ("CPU quota", limited, None),
        ("threads", _threads(found["cpus"], env), None),
        ("/dev/shm", shm_text, False if little or shm is None else None),
        ("memlock", f"{size(found['memlock'])}, for pinned memory and RDMA", None),
        (
            "nofile",
            f"{nofile['soft']} of up to {nofile['hard'] or 'any number of'} descriptors{few_text * few}",
            False if few else None,
        ),
        ("hosts", found["hosts"], None),
    ]


def _threads(n_cpus: int, env: Mapping[str, str]) -> str:
    if cpus.THREADS in env:
        return f"{env[cpus.THREADS]} for each rank, by {cpus.THREADS}"
    counts = ", ".join(f"{max(1, n_cpus // n)} with {n}" for n in (2, 4))
    return f"{n_cpus} usable CPUs, split among the ranks of a host under samestep run: {counts}"


def hosts(env: Mapping[str, str] = os.environ) -> str:
    """Where `samestep run` would start ranks without `--hosts`. Reads the files that a batch system names.

    Example:
      >>> hosts({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[1-2]"})
      'gpu[1-2], allotted by Slurm: start with srun, or with samestep run --mpi'
    """
    advice = "start with samestep run --mpi"
    if nodes := env.get("SLURM_JOB_NODELIST"):
        return f"{nodes}, allotted by Slurm: start with srun, or with samestep run --mpi"
    for variable, system in (("PBS_NODEFILE", "PBS"), ("PE_HOSTFILE", "SGE")):
        if variable in env:
            also = f", or with samestep run --hostfile ${variable}" if system == "PBS" else ""
            return f"{_first_words(env[variable])}, allotted by {system} ({variable}): {advice}{also}"
    if names := env.get("LSB_HOSTS"):
        return f"{','.join(dict.fromkeys(names.split()))}, allotted by LSF: {advice}"
    rank = launchers.launcher(env)
    here = f"this one, {os.uname().nodename}"
    return here if rank.name else f"{here}; samestep run --hosts names others"


def _first_words(file: str) -> str:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError as error:
        return f"unknown hosts ({error.strerror}: {file})"
    return ",".join(dict.fromkeys(line.split()[0] for line in lines if line.strip()))


def _limit(which: int, *, hard: bool = False) -> int | None:
    value = resource.getrlimit(which)[hard]
    return None if value == resource.RLIM_INFINITY else value


def _file_system(path: Path) -> dict[str, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return {"free": found.f_bavail * found.f_frsize, "total": found.f_blocks * found.f_frsize}

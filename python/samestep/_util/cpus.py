"""How many CPUs this process may use, and how many threads each rank of a host gets. Standard library only."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path

THREADS = "OMP_NUM_THREADS"


def threads_of_ranks(local_size: int, env: Mapping[str, str], n_cpus: int | None = None) -> dict[str, str]:
    """The variable that divides the CPUs of a host evenly among its ranks.

    Empty for a rank that has the host to itself, and where `env` says how many threads a rank has. More threads than
    CPUs make every matrix product wait for the threads that do not run; a single thread for each rank leaves CPUs idle
    on a host with more CPUs than ranks.

    Example:
      >>> threads_of_ranks(3, {}, 16), threads_of_ranks(3, {}, 2), threads_of_ranks(1, {}, 16)
      ({'OMP_NUM_THREADS': '5'}, {'OMP_NUM_THREADS': '1'}, {})
    """
    if local_size <= 1 or THREADS in env:
        return {}
    return {THREADS: str(max(1, (n_cpus or usable_cpus()) // local_size))}


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may use at once, by its affinity and the quota of its control groups; at least 1."""
    in_mask = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return max(1, in_mask if quota is None else min(in_mask, math.ceil(quota)))


@functools.cache  # programs open groups by the hundred
def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs that the control groups of this process grant it, or None."""
    found = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        of_version_2 = next((line[3:] for line in lines if line.startswith("0::")), "/")
        group = Path(of_version_2.lstrip("/"))
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError):
                file = (root / "sys/fs/cgroup" / folder / "cpu.max").read_text()
                quota, _, period = file.strip().partition(" ")
                if quota.isdigit() and int(period or 100_000):
                    found.append(int(quota) / int(period or 100_000))
    return min(found, default=None)

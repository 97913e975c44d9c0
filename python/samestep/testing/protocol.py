"""The messages between the pytest process and its ranks, pickled over one Unix socket per rank.

The socket is independent of every backend, so it works when a test has broken its group. Sequence:
Hello, Setup, Ready; then for each test Run, Failed for each phase that fails, Done; an empty message ends it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from samestep._util.launchers import MPI_LAUNCHERS, launcher


class Hello(NamedTuple):
    """rank -> parent: this rank runs."""

    rank: int
    pid: int


class Setup(NamedTuple):
    """parent -> rank: how to configure pytest in the rank, and the files to collect."""

    options: dict[str, Any]
    paths: list[str]


class Ready(NamedTuple):
    """rank -> parent: collected. `problems`: for each file with a collection error, its text."""

    problems: dict[str, str]


class Run(NamedTuple):
    """parent -> rank: run this test; fixtures that `next_id` does not share are torn down after it."""

    nodeid: str
    next_id: str | None
    timeout: float


class Failed(NamedTuple):
    """rank -> parent, at once: a phase of the test has failed. `reports`: as of Done."""

    reports: list[dict[str, Any]]


class Done(NamedTuple):
    """rank -> parent: the test has ended. `place`: a description of where its world runs.

    `reports`: pytest's serialised reports of the phases that have ended since the last message.
    """

    reports: list[dict[str, Any]]
    place: str


def launcher_world(env: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(rank, size) that an MPI launcher has given to this process, or None without one.

    Example:
      >>> launcher_world({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
      (1, 4)
    """
    found = launcher(env)
    interactive = found.name == "slurm" and found.size == 1  # a shell that srun has started
    return (found.rank, found.size) if found.name in MPI_LAUNCHERS and not interactive else None

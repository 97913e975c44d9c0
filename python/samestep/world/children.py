"""Processes that a rank has started: they have its variables, and are no ranks themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from samestep import _settings
from samestep._util import launchers
from samestep.backend import Backend
from samestep.errors import InvalidArgumentError
from samestep.group.group import Group

_PLACE = ("PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT")
_CURE = "put the call, and what uses it, under `if __name__ == '__main__':`"

_has_stood_in = False


def is_import_for_child() -> bool:
    """Whether `multiprocessing` imports the script in a process that it has started by "spawn" or "forkserver".

    Then the script is `__mp_main__`, and `__main__` is still what the interpreter has begun with, which has no file.
    """
    imported = sys.modules.get("__mp_main__")
    return hasattr(imported, "__file__") and not hasattr(sys.modules["__main__"], "__file__")


class StandIn(Backend):
    """What `initialize` returns to such an import: it knows its rank, and refuses everything else."""

    def __new__(cls, *_: int) -> StandIn:
        """Without a communicator."""
        return super(Group, cls).__new__(cls)

    def __init__(self, rank: int, size: int) -> None:
        object.__getattribute__(self, "__dict__").update(rank=rank, size=size)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        if name in ("rank", "size"):
            return object.__getattribute__(self, "__dict__")[name]
        raise InvalidArgumentError(refusal("initialize"))


def refusal(call: str) -> str:
    """Why there is no world while `multiprocessing` imports the script."""
    return (
        f"{call}: multiprocessing has started this process, and has imported the script again; the process is no "
        f"rank of the job: {_CURE}"
    )


def stood_in() -> bool:
    """Whether `initialize` has returned one in this process."""
    return _has_stood_in


def stand_in(arguments: Mapping[str, Any]) -> StandIn | None:
    """What `initialize` returns if it would join a job that this process has no place in; else None."""
    global _has_stood_in  # noqa: PLW0603
    if not is_import_for_child():
        return None
    started_by = launchers.launcher()
    rank, size = arguments["rank"], arguments["world_size"]
    if _is_alone(started_by) and rank is None and size is None and arguments["init_method"] is None:
        return None  # as its parent is
    _has_stood_in = True
    return StandIn(started_by.rank if rank is None else rank, started_by.size if size is None else size)


def _is_alone(started_by: launchers.Launcher) -> bool:
    """Whether the rank is a world of its own, which any process may be; but MPI cannot be started twice."""
    return started_by.size == 1 and started_by.name not in launchers.MPI_LAUNCHERS


def refuse_child(arguments: Mapping[str, Any]) -> None:
    """Raises InvalidArgumentError if an ancestor of this process is the rank that the variables describe."""
    pid, _, claimed = (_settings.get(_settings.RANK_PROCESS) or "").partition(" ")
    if not claimed or arguments["rank"] is not None or arguments["init_method"] not in (None, "env://"):
        return
    started_by = launchers.launcher()
    if claimed == _identity() and pid != str(os.getpid()) and os.path.exists(f"/proc/{pid}"):
        raise InvalidArgumentError(
            f"initialize: process {pid} is rank {started_by.rank} of {started_by.size}, and this one, which it has "
            f"started, has its variables: it is no rank. In a script that multiprocessing imports, {_CURE}; start "
            "other programs with `samestep run`, or without these variables"
        )


def claim() -> None:
    """Notes that this process is the rank that its variables describe."""
    if not _is_alone(launchers.launcher()):
        _settings.set_here(_settings.RANK_PROCESS, f"{os.getpid()} {_identity()}")


def release() -> None:
    """It has ended; a process that is started now may take its place."""
    _settings.set_here(_settings.RANK_PROCESS, None)


def _identity() -> str:
    started_by, env = launchers.launcher(), launchers.own_variables()
    place = ":".join(env.get(name, "") for name in _PLACE)
    return f"{started_by.name} {started_by.rank}/{started_by.size} {place}"

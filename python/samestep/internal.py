"""What the user interfaces other than `Backend` need of a group beside its public names. Not for users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from samestep import _core
from samestep.group.group import Group
from samestep.group.work import Enqueued
from samestep.world.opening import Opened

_Group = TypeVar("_Group", bound=Group)


def communicator(group: Group) -> _core.Communicator:
    """Its ranks, in the core."""
    return group._comm


def opened(group: Group) -> Opened:
    """What it was opened with."""
    return Opened(group._comm, group._bootstrap_comm, group._hosts, group._trusted)


def facts(group: Group, mine: Any, layout: Any) -> list[Any]:
    """A JSON value of each rank; see `json_exchange.allgather`. Collective."""
    return group._allgather_facts(mine, layout)


def child(group: _Group, comm: _core.Communicator, ranks: list[int], timeout: float) -> _Group:
    """The group of some ranks, which ends with this one."""
    return group._child(comm, ranks, timeout=timeout)


def adopt(group: Group, other: Group) -> None:
    """End `other` when this group ends, before it."""
    group._adopt(other)


def children(group: Group) -> Sequence[Group]:
    """The open groups that end with this one."""
    return group._children


def at_end(group: Group, end: Callable[[], None]) -> None:
    """Call `end` after the group has ended."""
    group._call_at_end(end)


def abandon(group: Group, reason: str) -> None:
    """Leave without the other ranks, which get `reason`."""
    group._abandon(reason)


def await_streams(group: Group, arrays: list[Any], timeout: float | None) -> None:
    """Wait for the streams of device arrays; a call that is late leaves the group."""
    group._await_streams(arrays, timeout)


def start_reduction(  # noqa: PLR0917 - as the core takes them
    group: Group, x: Any, into: Any, code: int, factor: float, root: int | None = None
) -> Enqueued:
    """Start an allreduce, or a reduce to `root`; `into`: receives the result, None: `x` does."""
    if root is None:
        return group._enqueue_allreduce(x, into, code, factor)
    return group._enqueue_reduce(x, into, code, factor, root)

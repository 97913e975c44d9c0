"""The methods of `Backend` as functions that take the backend first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from samestep.backend import Backend
from samestep.verbs import require_backend

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _function(method: Callable[Concatenate[Backend, _P], _R]) -> Callable[Concatenate[Backend, _P], _R]:
    name = method.__name__

    def function(backend: Backend, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        require_backend(name, backend)
        return getattr(backend, name)(*args, **kwargs)  # type: ignore[no-any-return]

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"`backend.{name}(...)`: see `Backend.{name}`.\n\n{method.__doc__ or ''}"
    function.__wrapped__ = method  # type: ignore[attr-defined]
    return function


def _property(name: str, doc: str) -> Callable[[Backend], int]:
    def function(backend: Backend) -> int:
        if not isinstance(backend, Backend):
            raise TypeError(
                f"{name}: the argument is the backend, e.g. samestep.get_distributed_backend(), "
                f"got {type(backend).__name__}"
            )
        value: Any = getattr(backend, "size" if name == "total_workers" else name)
        return int(value)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


rank = _property("rank", "This process's number in the group, from 0.")
total_workers = _property("total_workers", "How many ranks the group has.")
local_rank = _property("local_rank", "Number of this rank among those of its host, from 0.")
local_size = _property("local_size", "How many ranks of the group run on this host.")
node_rank = _property("node_rank", "Number of this host among those of the group.")
node_count = _property("node_count", "How many hosts the group has.")

allreduce = _function(Backend.allreduce)
iallreduce = _function(Backend.iallreduce)
reduce = _function(Backend.reduce)
ireduce = _function(Backend.ireduce)
bcast = _function(Backend.bcast)
ibcast = _function(Backend.ibcast)
allgather = _function(Backend.allgather)
iallgather = _function(Backend.iallgather)
gather = _function(Backend.gather)
igather = _function(Backend.igather)
scatter = _function(Backend.scatter)
iscatter = _function(Backend.iscatter)
reduce_scatter = _function(Backend.reduce_scatter)
ireduce_scatter = _function(Backend.ireduce_scatter)
alltoall = _function(Backend.alltoall)
ialltoall = _function(Backend.ialltoall)
send = _function(Backend.send)
isend = _function(Backend.isend)
recv = _function(Backend.recv)
irecv = _function(Backend.irecv)
barrier = _function(Backend.barrier)
ibarrier = _function(Backend.ibarrier)
allreduce_tree = _function(Backend.allreduce_tree)
println = _function(Backend.println)

"""The methods of `Backend` as functions whose first argument is the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from samestep.backend import Backend
from samestep.group.backend_argument import require_backend

_F = TypeVar("_F", bound=Callable[..., Any])


def _function(method: _F) -> _F:
    """Return a function with the signature of the method, including its overloads."""
    name = method.__name__

    def function(backend: Backend, /, *args: Any, **kwargs: Any) -> Any:
        require_backend(function, backend)
        return getattr(backend, name)(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"`backend.{name}(...)`: see `Backend.{name}`.\n\n{method.__doc__ or ''}"
    function.__wrapped__ = method  # type: ignore[attr-defined]
    return cast("_F", function)


def _property(name: str, doc: str) -> Callable[[Backend], int]:
    def function(backend: Backend) -> int:
        require_backend(function, backend)
        value: Any = getattr(backend, "size" if name == "total_workers" else name)
        return int(value)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


rank = _property("rank", "Return the rank of this process in the group, 0 <= rank < total_workers.")
total_workers = _property("total_workers", "Return the number of ranks of the group.")
local_rank = _property("local_rank", "Return the rank of this process among those of its host, from 0.")
local_size = _property("local_size", "Return the number of ranks of the group on this host.")
node_rank = _property("node_rank", "Return the number of this host among those of the group, from 0.")
node_count = _property("node_count", "Return the number of hosts of the group.")

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
same = _function(Backend.same)
together = _function(Backend.together)
any = _function(Backend.any)
all = _function(Backend.all)
all_finite = _function(Backend.all_finite)
println = _function(Backend.println)

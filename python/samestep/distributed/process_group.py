"""Initialization and shutdown of the process group, under torch's names."""

from __future__ import annotations

import contextlib
import weakref
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from samestep import _core, _settings, internal
from samestep import backend as samestep_backend
from samestep.distributed import groups, requests
from samestep.distributed.groups import KINDS, Backend, BackendName
from samestep.errors import Error, InvalidArgumentError
from samestep.rendezvous.store import RESERVED, PrefixStore, Store, seconds_of
from samestep.rendezvous.url import url_of_store
from samestep.world import lifecycle

__all__ = ["destroy_process_group", "init_process_group"]

DEFAULT_TIMEOUT = 1800.0  # seconds
_UNSAID = -1
_LEAVING_S = 1.0

_worlds_met_at: weakref.WeakKeyDictionary[Store, int] = weakref.WeakKeyDictionary()


def init_process_group(  # noqa: PLR0917 - positions that scripts rely on
    backend: BackendName | None = None,
    init_method: str | None = None,
    timeout: timedelta | float | None = None,
    world_size: int = _UNSAID,
    rank: int = _UNSAID,
    store: Store | None = None,
    group_name: str = "",
) -> None:
    """Join the other ranks of the job; return when all have joined. Collective.

    Args:
      backend: "gloo" (samestep's own), "mpi" or "nccl"; None: as `samestep.initialize` chooses.
      init_method: where ranks meet: "env://", "tcp://host:port" of rank 0, "file:///path", or a scheme of
        `register_rendezvous_handler`. None: "env://". MPI brings its ranks together by itself.
      timeout: to join, and of every operation; a timedelta or seconds. None: `SAMESTEP_TIMEOUT`, else 30 minutes.
      world_size: how many ranks; -1: from the URL's query or the launcher.
      rank: this one; -1: the same.
      store: instead of `init_method`; needs `rank` and `world_size`.
      group_name: ignored.

    Raises:
      InvalidArgumentError: a second call; wrong or contradicting values; a file left over from another job.
      UnavailableError: the backend cannot be used, the port is taken, or the rank has joined already.
      MismatchError: the ranks disagree on `world_size`.
      TimeoutError: names the ranks that did not join, and the address.

    Example:
      >>> import samestep.distributed as dist
      >>> dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
      >>> dist.is_initialized()
      True
      >>> dist.destroy_process_group()
    """
    if lifecycle.own_world() is not None:
        raise InvalidArgumentError(
            "init_process_group: the world is initialized twice; call destroy_process_group on all ranks first"
        )
    name = None if backend is None else Backend(backend)
    claims: dict[str, Any] = {"rank": _claim("rank", rank), "world_size": _claim("world_size", world_size)}
    if init_method is not None and not isinstance(init_method, str):
        raise TypeError(f"init_process_group: init_method must be a str, got {type(init_method).__name__}")
    if store is not None and init_method is not None:
        raise InvalidArgumentError("init_process_group: store and init_method exclude each other; give one")
    how: dict[str, Any] = {"timeout": _seconds(timeout)}
    kind = None if name is None else KINDS[name]
    if store is not None and name != "mpi":
        with _url_of(store, **claims) as url:
            _initialize(kind, init_method=url, **how)
        return
    if name == "mpi":
        init_method = None
    elif name == "gloo" and init_method is None:
        init_method = "env://"
    _initialize(kind, init_method=init_method, **claims, **how)


def _initialize(kind: Any, **how: Any) -> None:
    with _core.UserCall("init_process_group"):
        internal.communicator(lifecycle.initialize(kind, **how)).configure(torch_names=True)


def _claim(name: str, value: Any) -> int | None:
    number = groups.whole_number(value, "init_process_group", name)
    return None if number == _UNSAID else number


def _seconds(timeout: timedelta | float | None) -> float | None:
    if timeout is not None:
        return seconds_of(timeout)
    return None if _settings.get(_settings.TIMEOUT) is not None else DEFAULT_TIMEOUT


def _url_of(store: Store, rank: int | None, world_size: int | None) -> AbstractContextManager[str]:
    if not isinstance(store, Store):
        raise TypeError(
            f"init_process_group: store must be a samestep.distributed store, got {type(store).__name__}"
        )
    if rank is None or world_size is None:
        missing = "rank" if rank is None else "world_size"
        raise InvalidArgumentError(
            f"init_process_group: store needs rank and world_size; {missing} is missing"
        )
    if rank < 0:
        raise InvalidArgumentError(f"init_process_group: rank must be at least 0, got {rank}")
    number = _worlds_met_at[store] = _worlds_met_at.get(store, 0) + 1
    place = PrefixStore(f"world {number}", PrefixStore(RESERVED, store))  # a store may serve several jobs
    return url_of_store(place, rank, world_size)


def destroy_process_group(group: Any = None) -> None:
    """End a group, or with None or `group.WORLD` the world and all groups. Collective over the group.

    Without a world, for a group that has ended, and on ranks that are not in it, nothing happens. After the
    world has ended, `init_process_group` may follow.
    """
    if group is groups.GroupMember.NON_GROUP_MEMBER or lifecycle.own_world() is None:
        return
    if isinstance(group, samestep_backend.Backend) and group.closed:
        return
    of = groups.resolve(group)
    assert of is not None
    the_world = groups.the_world()
    failure = ""  # as text: an error in a variable keeps this frame, and with it the group
    try:
        of.barrier()
    except Error as error:  # a rank that has died or left must not delay others
        failure = str(error)
    requests.drain([*internal.children(of), of])
    with contextlib.suppress(Error):
        if failure:
            _leave(of, f"its group had ended: {failure}")
        if of is the_world:
            lifecycle.finalize()
        else:
            of.close()


def _leave(of: samestep_backend.Backend, why: str) -> None:
    """Leave a broken group on this rank alone; the transport below may not know that the group is broken."""
    members = (*internal.children(of), of)
    internal.abandon(of, why)
    for member in members:
        for comm in internal.opened(member)[:2]:
            if comm is not None:
                comm.close(_LEAVING_S)

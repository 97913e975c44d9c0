"""Groups on another backend than the world's."""

from __future__ import annotations

import functools
import os
import weakref
from typing import NamedTuple

from samestep import _core, facts, hosts, levels, terms
from samestep.backend import Backend, MPIBackend, NativeBackend
from samestep.errors import Error, UnavailableError
from samestep.objects import exchange_objects
from samestep.rendezvous import interfaces, mpi_world, native_world
from samestep.rendezvous.meeting import join
from samestep.rendezvous.tcp_store import TCPStore

__all__ = ["open_group", "why_not"]

_CARRIED = {("mpi", "native"), ("native", "mpi")}  # world's backend, group's
_LEAVING_S = 1.0


def why_not(world: Backend, kind: str) -> str:
    """Why no group of this world can be on another backend; "" if it can. Collective over the world.

    Starts MPI where that is what is asked for, since only MPI knows which processes it reaches.

    Args:
      world: of all ranks.
      kind: "mpi", "native" or "nccl"; another one than the world's.
    """
    if (world.kind, kind) not in _CARRIED:
        return (
            f"a group on backend {kind!r} is not carried by this version where the world's is {world.kind!r}: give "
            "init_process_group another one"
        )
    return _why_not_mpi(world) if kind == "mpi" else ""


def open_group(world: Backend, kind: str, members: list[int], timeout: float) -> Backend:
    """The group of these ranks on another backend, after `why_not` said nothing. Collective over the members.

    Args:
      world: of all ranks.
      kind: "mpi" or "native".
      members: ranks of the world, sorted.
      timeout: seconds for all to come, and of the group's operations.

    Raises:
      TimeoutError, UnavailableError: as a world of this backend.
    """
    where = [world._hosts[rank] for rank in members]
    between = world._comm.group(members, timeout)
    try:
        flat = _over_mpi(world, members, timeout) if kind == "mpi" else _without_mpi(between, where, timeout)
        mine = (terms.asked(), sorted(os.sched_getaffinity(0)))
        table = exchange_objects(between, mine, timeout)
        comm, beneath = levels.open_above(flat, kind, [asked for asked, _ in table], where, timeout)
        between.close(timeout)
    except BaseException as error:
        between.abandon(f"it failed with {type(error).__name__}: {error}")
        raise
    neighbours = [cpus for host, (_, cpus) in zip(where, table, strict=True) if host == where[comm.rank]]
    comm.set_oversubscribed(hosts.oversubscribed(neighbours, _core.usable_cpus()))
    made: type[Backend] = MPIBackend if kind == "mpi" else NativeBackend
    group = made(comm, timeout=timeout, device=world.device, world_hosts=where, beneath=beneath)
    world._children.append(group)
    return group


# ---- without MPI, in a world of MPI


def _without_mpi(between: _core.Communicator, where: list[str], timeout: float) -> _core.Communicator:
    """They meet at a store of the first of them, of which `between` tells."""
    name = f"{between.name} on gloo"
    if between.size == 1:
        return _core.make_self_communicator(name)
    store, problem = None, ""
    try:
        interfaces.check_names(os.environ)
        if between.rank == 0:
            address = interfaces.own_address("", os.environ, several_hosts=len(set(where)) > 1)
            store = TCPStore(address, 0, is_master=True, timeout=timeout)
    except Error as error:
        problem = str(error)
    place = None if store is None else (store.host, store.port)
    table = exchange_objects(between, (problem, place), timeout)
    for rank, (other, _) in enumerate(table):
        if other:
            raise UnavailableError(f"new_group: rank {rank} of the group cannot meet the others: {other}")
    if store is None:
        host, port = table[0][1]
        store = TCPStore(host, port, timeout=timeout)
    meeting = join(store, between.rank, between.size, timeout, owned=True)
    try:
        return native_world.communicator_over(meeting, timeout, name)
    finally:
        meeting.close()


# ---- over MPI, in a world without


class _MpiWorld(NamedTuple):
    """The communicator of MPI_COMM_WORLD, and the rank there of each rank of the world."""

    comm: _core.Communicator
    ranks: list[int]


_mpi_worlds: weakref.WeakKeyDictionary[Backend, _MpiWorld] = weakref.WeakKeyDictionary()


def _why_not_mpi(world: Backend) -> str:
    if world in _mpi_worlds:
        return ""
    loaded, problem = None, ""
    if world.size > 1 and facts.launcher().name not in facts.MPI_LAUNCHERS:
        problem = "no launcher of MPI started it"
    else:
        try:
            loaded = mpi_world.load()
        except Error as error:
            problem = str(error)
    place = (loaded.rank, loaded.size) if loaded is not None else (-1, 0)
    table = world.allgather_object((problem, *place))
    start = f"start the ranks with `samestep run --mpi -n {world.size}`, or another launcher of MPI"
    for rank, (other, _, _) in enumerate(table):
        if other:
            return f"MPI cannot carry a group, since on rank {rank}: {other}; {start}"
    ranks, sizes = [rank for _, rank, _ in table], {size for _, _, size in table}
    if sizes != {world.size} or sorted(ranks) != list(range(world.size)):
        there = " and ".join(map(str, sorted(sizes)))
        return f"the world has {world.size} ranks, but MPI's world {there}, and MPI reaches its own only; {start}"
    assert loaded is not None
    if world.size == 1:
        comm = _core.make_self_communicator("world of MPI")
    else:
        comm = mpi_world.open_world(loaded, oversubscribed=True, timeout=world.timeout)
    _mpi_worlds[world] = _MpiWorld(comm, ranks)
    world._call_at_end(functools.partial(_leave, comm))
    return ""


def _over_mpi(world: Backend, members: list[int], timeout: float) -> _core.Communicator:
    there = _mpi_worlds[world]
    return there.comm.group([there.ranks[rank] for rank in members], timeout)


def _leave(comm: _core.Communicator) -> None:
    """The world has ended, for all ranks or for this one."""
    try:
        comm.close(_LEAVING_S)
    except Error as error:
        comm.abandon(str(error))

"""Groups on a backend other than that of the world."""

from __future__ import annotations

import functools
import os
import weakref
from typing import NamedTuple

from samestep import _core, internal
from samestep._util import launchers
from samestep._util.text import error_line
from samestep.backend import Backend
from samestep.errors import Error, UnavailableError
from samestep.group import json_exchange
from samestep.rendezvous import interfaces
from samestep.rendezvous.rendezvous import join
from samestep.rendezvous.tcp_store import TCPStore
from samestep.world import mpi_world, native_world, opening
from samestep.world.making import CLASSES

_CARRIED = {("mpi", "native"), ("native", "mpi")}  # world's backend, group's
_LEAVING_S = 1.0


def reason_unavailable(world: Backend, kind: str) -> str:
    """Why no group of this world can be on another backend; "" if it can. Collective over the world.

    Starts MPI if `kind` is "mpi", because only MPI knows which processes it connects.
    """
    if (world.kind, kind) not in _CARRIED:
        return (
            f"a group on backend {kind!r} is not supported by this version where the world's is {world.kind!r}: give "
            "init_process_group another one"
        )
    return _why_not_mpi(world) if kind == "mpi" else ""


def open_group(world: Backend, kind: str, members: list[int], timeout: float) -> Backend:
    """The group of these ranks on another backend, which `reason_unavailable` allows. Collective over the members.

    `timeout`: seconds to wait for all members, and for each operation of the group.
    """
    where = [internal.opened(world).hosts[rank] for rank in members]
    between = internal.communicator(world).group(members, timeout)
    try:
        if kind == "mpi":
            there = _mpi_worlds[world]
            flat = there.comm.group([there.ranks[rank] for rank in members], timeout)
        else:
            flat = _without_mpi(between, where, timeout)
        proved = internal.opened(world).trusted or kind == "mpi"
        rows = json_exchange.allgather(between, opening.own_facts(proved), opening.FACTS, timeout)
        opened = opening.open_over(flat, kind, [opening.RankFacts(*row) for row in rows], timeout)
        between.close(timeout)
    except BaseException as error:
        between.abandon(f"it failed with {error_line(error)}")
        raise
    group = opened.as_backend(CLASSES[kind], timeout, world.device)
    internal.adopt(world, group)
    return group


# ---- without MPI, in a world of MPI


def _without_mpi(between: _core.Communicator, where: list[str], timeout: float) -> _core.Communicator:
    """The members meet at a store of the first one. `between` distributes its address and a new secret."""
    name = f"{between.name} on gloo"
    if between.size == 1:
        return _core.make_self_communicator(name)
    store, problem, secret = None, "", os.urandom(16) if between.rank == 0 else b""
    try:
        interfaces.check_names(os.environ)
        if between.rank == 0:
            address = interfaces.own_address("", os.environ, several_hosts=len(set(where)) > 1)
            store = TCPStore(address, 0, is_master=True, timeout=timeout, secret=secret)
    except Error as error:
        problem = str(error)
    endpoint = None if store is None else (store.host, store.port)
    layout = [str, ([str, int], None), str]
    table = json_exchange.allgather(between, (problem, endpoint, secret.hex()), layout, timeout)
    for rank, (other, *_) in enumerate(table):
        if other:
            raise UnavailableError(f"new_group: rank {rank} of the group cannot meet the others: {other}")
    if store is None:
        host, port = table[0][1]
        store = TCPStore(host, port, timeout=timeout, secret=bytes.fromhex(table[0][2]))
    rendezvous = join(store, between.rank, between.size, timeout, owned=True)
    try:
        return native_world.communicator_over(rendezvous, timeout, name)[0]
    finally:
        rendezvous.close()


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
    if world.size > 1 and launchers.launcher().name not in launchers.MPI_LAUNCHERS:
        problem = "no launcher of MPI started it"
    else:
        try:
            loaded = mpi_world.load()
        except Error as error:
            problem = str(error)
    rank_and_size = (loaded.rank, loaded.size) if loaded is not None else (-1, 0)
    table = internal.facts(world, (problem, *rank_and_size), [str, int, int])
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
    internal.at_end(world, functools.partial(_leave, comm))
    return ""


def _leave(comm: _core.Communicator) -> None:
    """Called when the world has ended, on all ranks or on this one."""
    try:
        comm.close(_LEAVING_S)
    except Error as error:
        comm.abandon(str(error))

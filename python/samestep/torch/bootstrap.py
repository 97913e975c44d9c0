"""Rendezvous of the ranks of a torch.distributed group."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist

from samestep import _core, _settings
from samestep._util import handshake, launchers
from samestep._util.cpus import usable_cpus
from samestep._util.json_layout import Many, Map
from samestep.backend import Backend, MPIBackend, NativeBackend
from samestep.errors import InvalidArgumentError, MismatchError
from samestep.group import hosts, trust
from samestep.group.group import warn
from samestep.rendezvous import interfaces
from samestep.rendezvous.rendezvous import Rendezvous, join
from samestep.rendezvous.torch_store import TorchStore
from samestep.world import (
    bootstrap_mpi,
    bootstrap_native,
    children,
    crash_report,
    equal_settings,
    lifecycle,
    transports,
)

__all__ = ["open_group"]

_LAYOUT = [str, Many(int), bool, Map(str), bool]

_mpi: _core.Communicator | None = None  # of MPI_COMM_WORLD; opened once, by all ranks


def open_group(
    store: Any, rank: int, size: int, timeout: float, *, name: str, global_ranks: list[int]
) -> Backend:
    """The group of ranks that meet at a store of torch. Collective over them.

    Ranks of one host use shared memory. Between hosts they use MPI if it started them, else TCP.

    Args:
      store: of torch, for this group alone.
      rank, size: of this rank in the group.
      timeout: seconds to wait for all members, and for each operation of the group.
      name: of the group, for messages.
      global_ranks: the members; empty for all.

    Raises:
      TimeoutError: names the ranks that did not join.
      UnavailableError: ranks cannot reach each other.
      MismatchError: the ranks do not agree on how they were started.
    """
    with _core.UserCall("init_process_group" if not global_ranks else "new_group"):
        return _open_group(store, rank, size, timeout, name=name, global_ranks=global_ranks)


def _open_group(
    store: Any, rank: int, size: int, timeout: float, *, name: str, global_ranks: list[int]
) -> Backend:
    if size > 1 and children.is_import_for_child():
        raise InvalidArgumentError(children.refusal("init_process_group"))
    lifecycle.prepare_core()
    interfaces.check_names(os.environ)
    world = dist.group.WORLD
    if global_ranks and hasattr(world, "get_group_store"):
        # torch's own keys have the number of groups that a rank has made, in which ranks may differ.
        store = dist.PrefixStore(f"group of ranks {global_ranks}", world.get_group_store())
    rendezvous = _meet(store, rank, size, timeout, name)
    mine: list[Any] = [
        hosts.host_identity(),
        sorted(os.sched_getaffinity(0)),
        _started_by_mpi(rank, size, global_ranks),
        equal_settings.local_settings(),
        trust.trusts(bool(handshake.job_secret())),
    ]
    table = [mine] if size == 1 else rendezvous.allgather_json(mine, _LAYOUT)
    everywhere = [host for host, *_ in table]
    asked = [given for _, _, _, given, _ in table]
    if _carried_by_mpi([by_mpi for _, _, by_mpi, _, _ in table], asked, everywhere):
        comm, trusted = _mpi_communicator(global_ranks, size, timeout, name), True
        kind: type[Backend] = MPIBackend
    else:
        comm, trusted = bootstrap_native.communicator_over(rendezvous, timeout, name)
        trusted = trusted or all(trusts for *_, trusts in table)
        kind = NativeBackend
        if not trusted and rank == 0:
            _warn_once()
    backend = "mpi" if kind is MPIBackend else "native"
    comm, bootstrap_comm = transports.select_transport(comm, backend, asked, everywhere, timeout)
    same_host = [cpus for host, cpus, *_ in table if host == everywhere[rank]]
    comm.configure(oversubscribed=hosts.oversubscribed(same_host, usable_cpus()), torch_names=True)
    crash_report.install()
    group = kind(
        comm, timeout=timeout, world_hosts=everywhere, bootstrap_comm=bootstrap_comm, trusted=trusted
    )
    if name == "world":
        lifecycle.note_world_of_torch(group)
    return group


def _meet(store: Any, rank: int, size: int, timeout: float, name: str) -> Rendezvous:
    """Wait for the other ranks at keys of this meeting alone: there may have been others at this store.

    torch gives a group the keys of an earlier one after `destroy_process_group`, or if it has the same members. So the
    store has the number of the meeting to come: a rank that joins reads it, and one that has met, or has given up,
    raises it. A group cannot be left before all have joined, so all of its ranks have read the same number.
    """
    keys = TorchStore(store, timeout)
    keys.where += f", for group '{name}'"
    if size == 1:
        return Rendezvous(keys, rank, size, timeout, owned=False)
    number = keys.compare_set("meeting", b"", b"0")
    meeting = TorchStore(dist.PrefixStore(f"meeting {number.decode()}", store), timeout)
    meeting.where = keys.where
    try:
        return join(meeting, rank, size, timeout)
    finally:
        keys.compare_set("meeting", number, str(int(number) + 1).encode())


@functools.cache
def _warn_once() -> None:
    warn(trust.warning())


def _started_by_mpi(rank: int, size: int, global_ranks: list[int]) -> bool:
    """Whether an MPI launcher has started this process as this rank of torch."""
    started_by = launchers.launcher()
    same = started_by.rank == (global_ranks[rank] if global_ranks else rank)
    return (
        started_by.name in launchers.MPI_LAUNCHERS
        and same
        and (bool(global_ranks) or size == started_by.size)
    )


def _carried_by_mpi(started_by_mpi: list[bool], asked: list[dict[str, str]], everywhere: list[str]) -> bool:
    """Whether MPI has started all of these ranks. Pure; the same on all ranks."""
    if any(by_mpi != started_by_mpi[0] for by_mpi in started_by_mpi):
        ranks = [rank for rank, by_mpi in enumerate(started_by_mpi) if not by_mpi]
        raise MismatchError(
            f"init_process_group('samestep'): an MPI launcher started some ranks, but not {ranks}; start all the same"
        )
    if not started_by_mpi[0] or len(everywhere) == 1:
        return False
    variable = _settings.TRANSPORTS["mpi"]
    return len(set(everywhere)) > 1 or equal_settings.require_equal(asked, [variable])[variable] == "mpi"


def _mpi_communicator(global_ranks: list[int], size: int, timeout: float, name: str) -> _core.Communicator:
    global _mpi  # noqa: PLW0603
    if _mpi is None:
        _mpi = bootstrap_mpi.open_world(bootstrap_mpi.load(), oversubscribed=True, timeout=timeout)
    return _mpi.group(global_ranks or list(range(size)), timeout, name)

"""How the ranks of a group of torch.distributed come together."""

from __future__ import annotations

import json
import os
from typing import Any

from samestep import _core, facts, hosts, levels, terms, uncaught, world
from samestep.backend import Backend, MPIBackend, NativeBackend
from samestep.errors import MismatchError
from samestep.rendezvous import interfaces, mpi_world, native_world
from samestep.rendezvous.meeting import Meeting
from samestep.torch.store import TorchStore

__all__ = ["open_group"]

_mpi: _core.Communicator | None = None  # of MPI_COMM_WORLD; opened once, by all ranks


def open_group(
    store: Any, rank: int, size: int, timeout: float, *, name: str, global_ranks: list[int]
) -> Backend:
    """The group of ranks that meet at a store of torch. Collective over them.

    Shared memory carries the ranks of one host; between hosts MPI does where it started them, else TCP.

    Args:
      store: of torch, for this group alone.
      rank, size: of this rank in the group.
      timeout: seconds for all to come, and of the group's operations.
      name: of the group, for messages.
      global_ranks: the members; empty for all.

    Raises:
      TimeoutError: names the ranks that did not come.
      UnavailableError: ranks cannot reach each other.
      MismatchError: the ranks do not agree on how they were started.
    """
    world.prepare_core()
    interfaces.check_names(os.environ)
    meeting = Meeting(TorchStore(store, timeout), rank, size, timeout, owned=False)
    mine: list[Any] = [
        hosts.host_identity(),
        sorted(os.sched_getaffinity(0)),
        _started_by_mpi(),
        terms.asked(),
    ]
    table = [mine] if size == 1 else [json.loads(t) for t in meeting.exchange(json.dumps(mine).encode())]
    everywhere = [host for host, _, _, _ in table]
    asked = [given for *_, given in table]
    if _carried_by_mpi([by_mpi for _, _, by_mpi, _ in table], asked, everywhere):
        comm = _mpi_communicator(global_ranks, size, timeout)
        kind: type[Backend] = MPIBackend
    else:
        comm = native_world.communicator_over(meeting, timeout, name)
        kind = NativeBackend
    backend = "mpi" if kind is MPIBackend else "native"
    comm, beneath = levels.open_above(comm, backend, asked, everywhere, timeout)
    neighbours = [cpus for host, cpus, _, _ in table if host == everywhere[rank]]
    comm.set_oversubscribed(hosts.oversubscribed(neighbours, _core.usable_cpus()))
    uncaught.install()
    return kind(comm, timeout=timeout, world_hosts=everywhere, beneath=beneath)


def _started_by_mpi() -> bool:
    return facts.launcher().name in facts.MPI_LAUNCHERS


def _carried_by_mpi(started_by_mpi: list[bool], asked: list[dict[str, str]], everywhere: list[str]) -> bool:
    """Pure; the same on all ranks."""
    if any(by_mpi != started_by_mpi[0] for by_mpi in started_by_mpi):
        ranks = [rank for rank, by_mpi in enumerate(started_by_mpi) if not by_mpi]
        raise MismatchError(
            f"init_process_group('samestep'): an MPI launcher started some ranks, but not {ranks}; start all alike"
        )
    if not started_by_mpi[0] or len(everywhere) == 1:
        return False
    engine = terms.ENGINES["mpi"]
    return len(set(everywhere)) > 1 or terms.agreed(asked, [engine])[engine] == "direct"


def _mpi_communicator(global_ranks: list[int], size: int, timeout: float) -> _core.Communicator:
    global _mpi  # noqa: PLW0603
    if _mpi is None:
        _mpi = mpi_world.open_world(mpi_world.load(), oversubscribed=True, timeout=timeout)
    return _mpi.group(global_ranks or list(range(size)), timeout)

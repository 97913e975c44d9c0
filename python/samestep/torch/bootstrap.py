"""Rendezvous of the ranks of a torch.distributed group."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

from samestep import _core, _settings
from samestep._util import handshake, launchers
from samestep.backend import Backend, MPIBackend, NativeBackend
from samestep.errors import InvalidArgumentError, MismatchError
from samestep.rendezvous import interfaces, local_links
from samestep.torch import meeting
from samestep.world import (
    bootstrap_mpi,
    bootstrap_native,
    children,
    crash_report,
    lifecycle,
    opening,
    transports,
)

_prepare_core_once = functools.cache(lifecycle.prepare_core)
_mpi: _core.Communicator | None = None  # of MPI_COMM_WORLD; opened once, by all ranks


def open_group(options: Any, name: str, meetings: meeting.Meetings | None) -> Backend:
    """The group of ranks that meet at a store of torch. Collective over them.

    Ranks of one host use shared memory. Between hosts they use MPI if it started them, else TCP.

    Args:
      options: of torch: its store for this group alone, the members, and how long to wait for them, and for each
        operation of the group.

    Raises:
      TimeoutError: names the ranks that did not join.
      UnavailableError: ranks cannot reach each other.
      MismatchError: the ranks do not agree on how they were started.
    """
    rank, size, timeout = options.group_rank, options.group_size, options.timeout.total_seconds()
    global_ranks = list(options.global_ranks_in_group)
    with _core.UserCall("init_process_group" if not global_ranks else "new_group"):
        if size > 1 and children.is_import_for_child():
            raise InvalidArgumentError(children.refusal("init_process_group"))
        (_prepare_core_once if global_ranks else lifecycle.prepare_core)()
        interfaces.check_names(os.environ)
        started_by = launchers.launcher()
        is_same = started_by.rank == (global_ranks[rank] if global_ranks else rank)
        # An MPI launcher has started this process as this rank of torch.
        by_mpi = started_by.name in launchers.MPI_LAUNCHERS and is_same
        by_mpi = by_mpi and (bool(global_ranks) or size == started_by.size)
        alone = contextlib.nullcontext()
        # Before the ranks meet, so that they say at once where it is.
        with alone if size == 1 else local_links.Listener() as listener:
            introduction = b"" if listener is None else listener.introduction
            mine = [*opening.own_facts(bool(handshake.job_secret())), by_mpi, introduction.hex()]
            layout = [*opening.FACTS, bool, str]
            rendezvous, rows = meeting.gather(
                options.store,
                rank,
                size,
                timeout,
                name=name,
                fact=mine,
                layout=layout,
                members=global_ranks,
                meetings=meetings,
            )
            table = [opening.RankFacts(*row[:-2]) for row in rows]
            introduced = bootstrap_native.Introduced(
                [facts.host for facts in table],
                [facts.asked for facts in table],
                listener,
                [bytes.fromhex(row[-1]) for row in rows],
            )
            kind: type[Backend]
            if _carried_by_mpi([row[-2] for row in rows], table):
                kind, comm, proved = MPIBackend, _mpi_communicator(global_ranks, size, timeout, name), True
            else:
                kind = NativeBackend
                comm, proved = bootstrap_native.communicator_over(rendezvous, timeout, name, introduced)
        opened = opening.open_over(comm, kind.kind, table, timeout, proved=proved)
        opened.comm.configure(torch_names=True)
        crash_report.install()
        group = opened.as_backend(kind, timeout)
        if name == "world":
            lifecycle.note_world_of_torch(group)
        return group


def _carried_by_mpi(started_by_mpi: list[bool], table: list[opening.RankFacts]) -> bool:
    """Whether MPI has started all of these ranks. Pure; the same on all ranks."""
    if any(by_mpi != started_by_mpi[0] for by_mpi in started_by_mpi):
        ranks = [rank for rank, by_mpi in enumerate(started_by_mpi) if not by_mpi]
        raise MismatchError(
            f"init_process_group('samestep'): an MPI launcher started some ranks, but not {ranks}; start all the same"
        )
    if not started_by_mpi[0] or len(table) == 1:
        return False
    variable = _settings.TRANSPORTS["mpi"]
    asked = transports.require_equal([facts.asked for facts in table], [variable])
    return len({facts.host for facts in table}) > 1 or asked[variable] == "mpi"


def _mpi_communicator(global_ranks: list[int], size: int, timeout: float, name: str) -> _core.Communicator:
    global _mpi  # noqa: PLW0603
    if _mpi is None:
        _mpi = bootstrap_mpi.open_world(bootstrap_mpi.load(), oversubscribed=True, timeout=timeout)
    return _mpi.group(global_ranks or list(range(size)), timeout, name)

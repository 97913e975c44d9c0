"""Where the ranks of a torch.distributed group meet, and what they tell each other there."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import threading
from typing import Any

import torch.distributed as dist

from samestep import _core, _settings
from samestep._util import handshake, launchers
from samestep.backend import Backend, MPIBackend, NativeBackend
from samestep.errors import InvalidArgumentError, MismatchError, TimeoutError
from samestep.rendezvous import interfaces, local_links
from samestep.rendezvous.rendezvous import Deadline, Rendezvous, facts_of, join, wait_for_ranks
from samestep.rendezvous.store import RESERVED, PrefixStore
from samestep.rendezvous.torch_store import TorchStore
from samestep.world import (
    children,
    crash_report,
    lifecycle,
    mpi_world,
    native_world,
    opening,
    transports,
)


class Meetings:
    """Those of the groups within one world of samestep.

    torch gives a group the keys of an earlier one after `destroy_process_group`, or if it has the same members. So each
    meeting has a number, and keys of its own. A rank that has come to a meeting, whether the others came, or not, comes
    to the next one then: within a world, which ends if one of its processes does, it knows the number itself.
    """

    def __init__(self) -> None:
        self.store: Any = None  # of torch, for this world alone
        # Of the world, if all its ranks run on one host: its communicator, and what each rank has said.
        self.node: tuple[_core.Communicator, list[opening.RankFacts]] | None = None
        self._next: dict[str, int] = {}
        self._mutex = threading.Lock()

    def take(self, who: str) -> int:
        """The number of the next meeting of these ranks: of this thread alone, if several make such groups."""
        with self._mutex:
            number = self._next.get(who, 0)
            self._next[who] = number + 1
        return number


def gather(options: Any, name: str, says: bytes, meetings: Meetings | None) -> tuple[Rendezvous, list[bytes]]:
    """Wait for the other ranks, and hear what they say. Collective.

    Args:
      options: as in `open_group`.
      says: what this rank has to say, not nothing.
      meetings: of the world, for members to come to, or for the world to begin; None if it is no world of samestep.

    Returns:
      The ranks that have met, and what each of them says.
    """
    rank, size, timeout = options.group_rank, options.group_size, options.timeout.total_seconds()
    keys = TorchStore(options.store, timeout)
    keys.where += f", for group '{name}'"
    if size == 1:
        return Rendezvous(keys, rank, size, timeout, owned=False), [says]
    if options.global_ranks_in_group:
        return _meet_within(keys, options, meetings, says)
    # A rank that joins reads the number of the meeting to come. One that has met, or has given up, raises it. A group
    # cannot be left before all have joined, so all of its ranks have read the same number.
    number = keys.compare_set("meeting", b"", b"0")
    place = dist.PrefixStore(f"meeting {number.decode()}", options.store)
    try:
        met = join(_at(place, keys), rank, size, timeout)
    finally:
        keys.compare_set("meeting", number, str(int(number) + 1).encode())
    if meetings is not None:
        meetings.store = place
    return met, met.allgather_bytes(says)


def _at(store: Any, like: TorchStore) -> TorchStore:
    made = copy.copy(like)
    made._store = store
    return made


def _meet_within(
    keys: TorchStore, options: Any, meetings: Meetings | None, says: bytes
) -> tuple[Rendezvous, list[bytes]]:
    """As `gather`, for ranks that cannot differ in their number, nor share one: the keys have the members."""
    who = f"group of ranks {list(options.global_ranks_in_group)}"
    rank, size, deadline = options.group_rank, options.group_size, Deadline(options.timeout.total_seconds())
    number = 0
    if meetings is not None and meetings.store is not None:
        base = meetings.store
    else:
        base, meetings = getattr(dist.group.WORLD, "get_group_store", lambda: keys._store)(), None
        keys = _at(dist.PrefixStore(who, base), keys)
        number = int(keys.compare_set("meeting", b"", b"0"))
    while True:
        if meetings is not None:
            number = meetings.take(who)
        meeting = _at(dist.PrefixStore(f"{who}, meeting {number}", base), keys)
        number += 1
        # A late rank may have set the number back below, to a meeting that this rank has given up, and others left.
        if meetings is None and meeting.add(f"comings of rank {rank}", 1) > 1:
            continue
        try:
            said = _say_and_hear(meeting, rank, size, deadline, says)
        finally:
            if meetings is None:
                keys.set("meeting", str(number))
        # Else one had given up before the last one came: then all come to the next meeting.
        if b"" not in said:
            return Rendezvous(meeting, rank, size, deadline.timeout, owned=False), said


def _say_and_hear(store: TorchStore, rank: int, size: int, deadline: Deadline, says: bytes) -> list[bytes]:
    """`join` and `allgather_bytes` in one: what a rank says shows that it has joined; nothing, that it has given up."""
    keys = PrefixStore(RESERVED, store)
    names = [f"rank {other}" for other in range(size)]
    mine = names.pop(rank)
    keys.set(mine, says)
    try:
        if text := wait_for_ranks(keys, names, rank, size, deadline):
            raise TimeoutError(text)
        said = keys._apply("present", keys._paths(names))
    except BaseException:
        with contextlib.suppress(Exception):
            keys.set(mine, b"")
        raise
    return [*said[:rank], says, *said[rank:]]


_known_facts: dict[bytes, Any] = {}
_mpi: _core.Communicator | None = None  # of MPI_COMM_WORLD; opened once, by all ranks


def open_group(options: Any, name: str, meetings: Meetings | None) -> Backend:
    """The group of ranks that meet at a store of torch. Collective over them.

    Ranks of one host use shared memory. Between hosts they use MPI if it started them, else TCP.

    Args:
      options: of torch: its store for this group alone, the members, and how long to wait for them, and for each
        operation of the group.
    """
    rank, size, timeout = options.group_rank, options.group_size, options.timeout.total_seconds()
    global_ranks = list(options.global_ranks_in_group)
    with _core.UserCall("init_process_group" if not global_ranks else "new_group"):
        if size > 1 and children.is_import_for_child():
            raise InvalidArgumentError(children.refusal("init_process_group"))
        if size > 1 and meetings is not None and meetings.node is not None and global_ranks:
            return _open_beside(*meetings.node, global_ranks, name, timeout)
        started_by = (_prepare_once if global_ranks else _prepare)()
        is_same = started_by.rank == (global_ranks[rank] if global_ranks else rank)
        # An MPI launcher has started this process as this rank of torch.
        by_mpi = started_by.name in launchers.MPI_LAUNCHERS and is_same
        by_mpi = by_mpi and (bool(global_ranks) or size == started_by.size)
        alone = contextlib.nullcontext()
        # Before the ranks meet, so that they say at once where it is.
        with alone if size == 1 else local_links.Listener() as listener:
            introduction = b"" if listener is None else transports.with_probe(listener.introduction)
            mine = [*opening.own_facts(bool(handshake.job_secret())), by_mpi]
            says = introduction + json.dumps(mine).encode()
            rendezvous, said = gather(options, name, says, meetings)
            nbytes = len(introduction)
            rows = facts_of(
                [text[nbytes:] for text in said], [*opening.FACTS, bool], rendezvous, _known_facts
            )
            table = [opening.RankFacts(*row[:-1]) for row in rows]
            introduced = native_world.Introduced(
                [facts.host for facts in table],
                [facts.asked for facts in table],
                listener,
                [text[:nbytes] for text in said],
            )
            kind: type[Backend]
            if _carried_by_mpi([row[-1] for row in rows], table):
                kind, comm, proved = MPIBackend, _mpi_communicator(global_ranks, size, timeout, name), True
            else:
                kind = NativeBackend
                comm, proved = native_world.communicator_over(rendezvous, timeout, name, introduced)
        opened = opening.open_over(comm, kind.kind, table, timeout, proved=proved)
        opened.comm.configure(torch_names=True)
        crash_report.install()
        group = opened.as_backend(kind, timeout)
        if name == "world":
            lifecycle.note_world_of_torch(group)
        if meetings is not None and not global_ranks and opened.comm.transport == "shm":
            meetings.node = opened.comm, table
        return group


def _open_beside(
    world: _core.Communicator, facts: list[opening.RankFacts], ranks: list[int], name: str, timeout: float
) -> Backend:
    """A group of ranks that share a host and know each other: they need no store to meet, and no new connections."""
    _core.discard_abandoned_groups()
    comm = _core.open_beside(world, ranks, name, timeout)
    opened = opening.open_over(comm, "native", [facts[rank] for rank in ranks], timeout, proved=True)
    opened.comm.configure(torch_names=True)
    return opened.as_backend(NativeBackend, timeout)


def _prepare() -> launchers.Launcher:
    lifecycle.prepare_core()
    interfaces.check_names(os.environ)
    return launchers.launcher()


_prepare_once = functools.cache(_prepare)  # groups are opened by the hundred


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
        _mpi = mpi_world.open_world(mpi_world.load(), oversubscribed=True, timeout=timeout)
    return _mpi.group(global_ranks or list(range(size)), timeout, name)

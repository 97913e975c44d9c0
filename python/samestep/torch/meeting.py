"""Where the ranks of a torch.distributed group meet, and what they tell each other there."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch.distributed as dist

from samestep.errors import TimeoutError
from samestep.rendezvous.rendezvous import Deadline, Rendezvous, facts_of, join, wait_for_ranks
from samestep.rendezvous.store import PrefixStore
from samestep.rendezvous.table import RESERVED
from samestep.rendezvous.torch_store import TorchStore

__all__ = ["gather"]


def gather(
    store: Any,
    rank: int,
    size: int,
    timeout: float,
    *,
    name: str,
    fact: Any,
    layout: Any,
    knows_ranks: bool,
) -> tuple[Rendezvous, list[Any]]:
    """Wait for the other ranks at keys of this meeting alone: there may have been others at this store. Collective.

    torch gives a group the keys of an earlier one after `destroy_process_group`, or if it has the same members. So the
    store has the number of the meeting to come: a rank that joins reads it, and one that has met, or has given up,
    raises it. A group cannot be left before all have joined, so all of its ranks have read the same number. A number
    that a late rank sets back does no harm: what a rank has said at a meeting is replaced when it gives up, or returns.

    Args:
      store: of torch, for this group alone.
      rank, size: of this rank.
      timeout: seconds until all ranks have come.
      name: of the group, for messages.
      fact, layout: as in `Rendezvous.allgather_json`.
      knows_ranks: the store's keys have the members, so that ranks cannot differ in their number, nor share one.

    Returns:
      The ranks that have met, and the facts of all.

    Raises:
      TimeoutError: names the ranks that did not come.
      MismatchError, UnavailableError: as `rendezvous.join`.
    """
    keys = TorchStore(store, timeout)
    keys.where += f", for group '{name}'"
    if size == 1:
        return Rendezvous(keys, rank, size, timeout, owned=False), [fact]
    number = keys.compare_set("meeting", b"", b"0")
    meeting = TorchStore(dist.PrefixStore(f"meeting {number.decode()}", store), timeout)
    meeting.where = keys.where
    try:
        if knows_ranks:
            met = Rendezvous(meeting, rank, size, timeout, owned=False)
            return met, _say_and_hear(meeting, met, fact, layout, timeout)
        met = join(meeting, rank, size, timeout)
        return met, met.allgather_json(fact, layout)
    finally:
        keys.set("meeting", str(int(number) + 1).encode())


def _say_and_hear(store: TorchStore, met: Rendezvous, fact: Any, layout: Any, timeout: float) -> list[Any]:
    """`join` and `allgather_json` in one: what a rank says shows that it has joined."""
    keys = PrefixStore(RESERVED, store)
    names = [f"rank {rank}" for rank in range(met.size)]
    keys.set(names[met.rank], json.dumps(fact))
    try:
        if text := wait_for_ranks(keys, names, met.rank, met.size, Deadline(timeout)):
            raise TimeoutError(text)
        facts = facts_of(keys._apply("present", keys._paths(names)), (layout, str), store.where)
    except BaseException as error:
        with contextlib.suppress(Exception):  # for ranks that have been waiting, if the last one comes now
            keys.set(names[met.rank], json.dumps(str(error)))
        raise
    for heard in facts:
        if isinstance(heard, str):
            raise TimeoutError(heard)
    return facts

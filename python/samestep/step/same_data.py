"""Whether the ranks draw their data in one order, which each of them decides alone."""

from __future__ import annotations

from samestep._util.text import ranks_text
from samestep.errors import MismatchError
from samestep.group.group import Group


def require_same_order(backend: Group, timeout: float | None = None) -> None:
    """Compare what those that draw data for this group say of it, the first that has begun on each rank. Collective.

    They cannot do so themselves: which calls of a loader are made on all ranks, and when, is not known there. A rank
    where none has begun is left out, as it may read other data.

    Raises:
      MismatchError: on all ranks, if two ranks draw from other numbers of items or other seeds, or in other modes.
    """
    if backend.size == 1:
        return
    told = (follower.order_text() for follower in list(backend._changed) if hasattr(follower, "order_text"))
    found = backend._allgather_facts(next(filter(None, told), ""), str, timeout)
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(found):
        if text:
            ranks.setdefault(text, []).append(rank)
    if len(ranks) > 1:
        listed = "; ".join(f"{ranks_text(of)}: {text}" for text, of in ranks.items())
        raise MismatchError(
            "DistributedSampler: the ranks draw from different orders, so that together they do not visit each item "
            f"once; give all of them the whole data and the same seed. {listed}"
        )

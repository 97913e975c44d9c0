"""Sums of gradients over some of the shards of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from samestep import _core
from samestep.step.leaves import Flat, Layout, identity_of


class Memory:
    """A pool of flat arrays.

    Args:
      new: makes an array from its number of elements and its dtype.
    """

    def __init__(self, new: Callable[[int, str], Flat]) -> None:
        self._new = new
        self._free: dict[tuple[int, str], list[Flat]] = {}

    def take(self, layout: Layout) -> dict[str, Flat]:
        """An array for each dtype of `layout`, its elements not set."""
        found = {}
        for group, slices in layout.groups.items():
            key = slices.starts[-1], group
            found[group] = self._free[key].pop() if self._free.get(key) else self._new(*key)
        return found

    def release(self, flats: dict[str, Flat]) -> None:
        """Return arrays to the pool."""
        for group, flat in flats.items():
            self._free.setdefault((flat.size, group), []).append(flat)

    def forget(self) -> None:
        """Free the arrays in the pool, because the layout has changed."""
        self._free.clear()


class Term(NamedTuple):
    """The arrays of one shard, which count `weight` times."""

    leaves: Sequence[Any]
    weight: float


class Partial:
    """The weighted sum over some shards; it has neither `flats` nor a `term` while all of them had weight zero."""

    def __init__(self, term: Term | None = None, present: int = 0) -> None:
        self.weight = 0.0 if term is None else term.weight
        self.flats: dict[str, Flat] | None = None
        self.term = term
        """In place of `flats`: the arrays of a single shard, not copied."""
        self.present = present
        """Bit i is set if a shard of positive weight had an array as leaf i, not None."""

    def absorb(self, siblings: Sequence[Partial], layout: Layout, memory: Memory) -> None:
        """Add `siblings`, one after another, each to the sum so far; their memory is used or free again."""
        terms = [] if self.term is None else [self.term]
        sums = [] if self.flats is None else [self.flats]
        for sibling in siblings:
            self.weight = sibling.weight + self.weight
            self.present |= sibling.present
            if sibling.term is not None and not sums and len(terms) < 2:
                terms.append(sibling.term)
            elif not sibling.is_empty:
                sums.append(sibling.settled(layout, memory))
        if len(terms) + len(sums) < 2:
            self.term, self.flats = next(iter(terms), None), next(iter(sums), None)
            return
        self.term, self.flats = None, sums[-1] if sums else memory.take(layout)
        _add(layout, terms, sums, self.flats)
        for flats in sums[:-1]:
            memory.release(flats)

    @property
    def is_empty(self) -> bool:
        """Whether no shard of positive weight has been added."""
        return self.term is None and self.flats is None

    def settled(self, layout: Layout, memory: Memory) -> dict[str, Flat]:
        """The sums, in memory of their own from here on; without any, the neutral elements."""
        if self.flats is None:
            self.flats = memory.take(layout)
            _add(layout, [] if self.term is None else [self.term], [], self.flats)
            self.term = None
        return self.flats

    def move(self, old: Layout, new: Layout, memory: Memory) -> None:
        """Move to the layout `new`, which has leaves that `old` lacks."""
        if self.flats is not None:
            flats = memory.take(new)
            for group, flat in flats.items():
                flat[...] = identity_of(group)
            for i, spec in enumerate(old.specs):
                if spec.group:
                    new.part(flats, i)[...] = old.part(self.flats, i)
            self.flats = flats


def _add(
    layout: Layout, terms: Sequence[Term], sums: Sequence[dict[str, Flat]], out: dict[str, Flat]
) -> None:
    """`out` = sums[n - 1] + (... + (sums[0] + the weighted terms)); see csrc/kernels/weighted_sum.h."""
    for group, slices in layout.groups.items():
        trees = [([term.leaves[i] for i in slices.leaves], term.weight) for term in terms]
        _core.add_weighted(trees, slices.starts, [flats[group] for flats in sums], out[group])

"""Sums of gradients over some of the shards of a step, and those of all ranks, in the order of the tree over shards."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep import _core
from samestep.group.group import Group
from samestep.step.leaves import Flat, Layout, identity_of
from samestep.step.shards import Node, PairwiseTree, is_one_node_each
from samestep.trees.fusion import Timer


class Memory:
    """A pool of flat arrays, which `new` makes of a number of elements and a dtype."""

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


_SEGMENT = 1 << 20  # elements of each node in one exchange: bounds the memory


def combine_weights(n_shards: int, nodes: list[list[Node]], weights: list[list[float]]) -> float:
    """The sum of the weights of all nodes, by rank as the nodes are, added in the order of the tree."""
    tree: PairwiseTree[float] = PairwiseTree(
        n_shards, lambda value, siblings: functools.reduce(operator.add, siblings, value)
    )
    for keys, values in zip(nodes, weights, strict=True):
        for node, weight in zip(keys, values, strict=True):
            tree.add(node, weight)
    return next(iter(tree.nodes.values()))


def combine(
    backend: Group, n_shards: int, nodes: list[list[Node]], mine: list[dict[str, Flat]], left: Timer
) -> dict[str, Flat]:
    """The sums over all shards, on every rank. Collective.

    If every rank holds at most one node, the reduction over ranks continues the tree over shards: one
    allreduce for each dtype. Otherwise each rank receives its part of all nodes, combines it, and sends the result
    to all.

    Args:
      nodes: by rank, the nodes that it holds.
      mine: the sums of this rank's nodes, in order; at least one array, which may be the identity of the
        sum. They may be overwritten.
    """
    if backend.size == 1:
        return mine[0]
    if is_one_node_each(n_shards, backend.size) and _adds_in_pairs(backend._hosts):
        for flat in mine[0].values():
            backend.allreduce(flat, "sum", timeout=left())
        return mine[0]
    for group, flat in mine[0].items():
        for start in range(0, flat.size, _SEGMENT):
            parts = [node[group][start : start + _SEGMENT] for node in mine]
            _combine_segment(backend, n_shards, nodes, parts, left)
    return mine[0]


def _adds_in_pairs(hosts: list[str]) -> bool:
    """Whether a reduction that adds within each of these hosts (by rank) first is pairwise over all ranks."""
    length = next((i for i, host in enumerate(hosts) if host != hosts[0]), len(hosts))
    if length == len(hosts):
        return True
    runs = [set(hosts[i : i + length]) for i in range(0, len(hosts), length)]
    same_length = len(hosts) % length == 0 and all(len(run) == 1 for run in runs)
    return same_length and length & (length - 1) == 0 and len(set().union(*runs)) == len(runs)


def _combine_segment(
    backend: Group, n_shards: int, nodes: list[list[Node]], parts: list[Flat], left: Timer
) -> None:
    out = parts[0]
    size, rank, dtype = backend.size, backend.rank, out.dtype
    edges = [out.size * r // size for r in range(size + 1)]
    lengths = [stop - start for start, stop in itertools.pairwise(edges)]
    parts = parts[: len(nodes[rank])]
    sent = (
        np.concatenate([part[start:stop] for start, stop in itertools.pairwise(edges) for part in parts])
        if parts
        else np.empty(0, dtype)
    )
    n_of = [len(keys) for keys in nodes]
    received: Any = np.empty(sum(n_of) * lengths[rank], dtype)
    backend._comm.alltoallv(
        sent, [n_of[rank] * n for n in lengths], received, [n * lengths[rank] for n in n_of]
    ).wait(backend._seconds(left()), True)
    tree: PairwiseTree[Flat] = PairwiseTree(
        n_shards,
        lambda value, siblings: functools.reduce(lambda a, b: np.add(a, b, out=a), siblings, value),
    )
    rows = received.reshape(sum(n_of), lengths[rank])
    with np.errstate(over="ignore", invalid="ignore"):
        for node, row in zip((node for keys in nodes for node in keys), rows, strict=True):
            tree.add(node, row)
    total = next(iter(tree.nodes.values()))
    backend._comm.allgatherv(total, out, lengths).wait(backend._seconds(left()), True)

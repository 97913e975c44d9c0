"""The sums of all ranks, combined in the order of the tree over shards."""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import numpy as np

from samestep.group.group import Group
from samestep.step.leaves import Flat
from samestep.step.shards import Node, PairwiseTree, is_one_node_each
from samestep.trees.fusion import Timer

_SEGMENT = 1 << 20  # elements of each node in one exchange: bounds the memory


def combine_weights(n_shards: int, nodes: list[list[Node]], weights: list[list[float]]) -> float:
    """The sum of the weights of all shards, added in the order of the tree.

    Args:
      n_shards: of the step.
      nodes: by rank, the nodes that it holds.
      weights: by rank, the weights of its nodes.
    """
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
      backend: the group.
      n_shards: of the step.
      nodes: by rank, the nodes that it holds.
      left: seconds left.
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

"""Which shards of a step each rank works on, and the fixed pairwise tree in which their results are added.

Pure: the tree depends on the number of shards alone, never on which rank holds which shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

_T = TypeVar("_T")


class Node(NamedTuple):
    """The shards `position * 2**level` to `(position + 1) * 2**level - 1`, as far as they exist."""

    level: int
    position: int


def part_of(length: int, rank: int, size: int) -> range:
    """The contiguous run of `range(length)` that belongs to `rank` of `size`.

    Runs follow each other in order of rank and differ in length by at most one, the longer ones first.

    Example:
      >>> [part_of(10, rank, 4) for rank in range(4)]
      [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    """
    shortest, n_longer = divmod(length, size)
    start = rank * shortest + min(rank, n_longer)
    return range(start, start + shortest + (rank < n_longer))


def shards_of(n_shards: int, rank: int, size: int) -> range:
    """The shards that `rank` of `size` works on: a contiguous run, the longest of ceil(n_shards / size).

    If that length is a power of two, all runs but the last have it. Then each run is one node of the tree, and
    ranks at the end may have none. Otherwise runs differ in length by at most one, the longer ones first.

    Example:
      >>> [list(shards_of(8, rank, 3)) for rank in range(3)]
      [[0, 1, 2], [3, 4, 5], [6, 7]]
      >>> [list(shards_of(8, rank, 5)) for rank in range(5)]
      [[0, 1], [2, 3], [4, 5], [6, 7], []]
    """
    longest = -(-n_shards // size)
    if longest & (longest - 1) == 0:
        start = min(rank * longest, n_shards)
        return range(start, min(start + longest, n_shards))
    return part_of(n_shards, rank, size)


def is_one_node_each(n_shards: int, size: int) -> bool:
    """Whether the run of every rank is one node, so that the tree over ranks continues the one over shards.

    Example:
      >>> [size for size in range(1, 10) if is_one_node_each(8, size)]
      [1, 2, 4, 5, 6, 7, 8, 9]
    """
    longest = -(-n_shards // size)
    return size == 1 or longest & (longest - 1) == 0


class PairwiseTree(Generic[_T]):
    """Sums over shards 0 to n - 1, combined pairwise: ((0 + 1) + (2 + 3)) + ...

    A node whose right half lies beyond the last shard is its left half. Shards and nodes may be added in any
    order; in ascending order no more than about log2 n partial sums are kept.

    Args:
      merge: `merge(value, siblings)` returns the sum of a new value and what it meets, one sibling after another,
        each added to the sum so far; it may reuse the memory of any. As additions commute, the siblings may be on the
        left or on the right.

    Example:
      >>> tree = PairwiseTree(3, lambda value, siblings: "".join([*siblings[::-1], value]))
      >>> for shard in "0", "1", "2":
      ...     tree.add(Node(0, int(shard)), shard)
      >>> tree.nodes
      {Node(level=2, position=0): '012'}
    """

    def __init__(self, n_shards: int, merge: Callable[[_T, list[_T]], _T]) -> None:
        self.nodes: dict[Node, _T] = {}
        self._n_shards = n_shards
        self._merge = merge

    def add(self, node: Node, value: _T) -> None:
        """Add the sum over the shards of `node`, and combine it with adjacent sums as far as possible."""
        level, index = node
        siblings = []
        while (1 << level) < self._n_shards:
            sibling = Node(level, index ^ 1)
            if sibling in self.nodes:
                siblings.append(self.nodes.pop(sibling))
            elif index & 1 or sibling.position << level < self._n_shards:
                break
            level, index = level + 1, index >> 1
        self.nodes[Node(level, index)] = self._merge(value, siblings)

    def in_order(self) -> list[tuple[Node, _T]]:
        """Nodes in the order of their shards."""
        return sorted(self.nodes.items(), key=lambda item: item[0].position << item[0].level)


def final_nodes(n_shards: int, shards: Iterable[int]) -> list[Node]:
    """The nodes that remain when `shards` have been combined as far as possible, in order.

    Example:
      >>> final_nodes(8, range(3, 6))
      [Node(level=0, position=3), Node(level=1, position=2)]
    """
    tree: PairwiseTree[None] = PairwiseTree(n_shards, lambda value, siblings: None)
    for shard in shards:
        tree.add(Node(0, shard), None)
    return [node for node, _ in tree.in_order()]

"""Which elements of a tree each rank updates: contiguous parts of flat buffers, one buffer for each dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GRANULE = 64
"""Elements: leaves start, and ranks meet, at multiples of it. Vectorised updates then see the ends of leaves where they
see them without a partition, and no part is smaller than a cache line."""


class Buffer(NamedTuple):
    """The leaves of one dtype, one after another. Rank r owns elements r * block to (r + 1) * block - 1."""

    leaves: list[int]
    starts: list[int]
    """Where each of them begins, in elements."""
    block: int


class Partition:
    """The parts of all leaves. Pure: every rank computes the same one.

    Args:
      counts: elements of each leaf.
      dtypes: of each leaf; None for a leaf that has no elements to update, of which no rank has a part.
      size: number of ranks.

    Example:
      >>> parts = Partition([100, 3, 0, 200], ["f4", "f4", "f4", "f8"], size=2)
      >>> parts.buffers["f4"]
      Buffer(leaves=[0, 1, 2], starts=[0, 128, 192], block=128)
      >>> [[len(parts.part(leaf, rank)) for leaf in range(4)] for rank in range(2)]
      [[100, 0, 0, 128], [0, 3, 0, 72]]
    """

    def __init__(self, counts: Sequence[int], dtypes: Sequence[str | None], size: int) -> None:
        self.counts = list(counts)
        self.size = size
        self.buffers: dict[str, Buffer] = {}
        self._where: list[tuple[int, int] | None] = [None] * len(counts)  # start and block, by leaf
        for dtype in dict.fromkeys(kind for kind in dtypes if kind is not None):
            leaves = [i for i, kind in enumerate(dtypes) if kind == dtype]
            starts, length = [], 0
            for i in leaves:
                starts.append(length)
                length += _whole_granules(counts[i])
            block = _whole_granules(-(-length // size))
            self.buffers[dtype] = Buffer(leaves, starts, block)
            for i, start in zip(leaves, starts, strict=True):
                self._where[i] = start, block

    def part(self, leaf: int, rank: int) -> range:
        """The elements of `leaf` that `rank` owns."""
        where = self._where[leaf]
        if where is None:
            return range(0)
        start, block = where
        count = self.counts[leaf]
        first = min(max(rank * block - start, 0), count)
        return range(first, max(first, min((rank + 1) * block - start, count)))


def _whole_granules(count: int) -> int:
    return -(-count // GRANULE) * GRANULE

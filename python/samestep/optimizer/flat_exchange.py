"""The collectives of sharded updates: whole leaves in, this rank's elements out, and the reverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep import _core
from samestep.arrays import ArrayInfo
from samestep.errors import InvalidArgumentError
from samestep.group.group import Group
from samestep.reduce_ops import Op
from samestep.step.leaves import Flat
from samestep.trees import signature
from samestep.trees.facts import NO_FACTS, Facts
from samestep.trees.fusion import as_dtype, timer

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


class FlatExchange:
    """Moves leaves through flat buffers, one for each dtype of the partition."""

    def __init__(self, backend: Group, partition: Partition, names: Sequence[str]) -> None:
        self.partition = partition
        self._backend = backend
        self._names = names
        self._memory: dict[tuple[str, str], Flat] = {}

    def part(self, leaf: int) -> range:
        """The elements of `leaf` that this rank owns."""
        return self.partition.part(leaf, self._backend.rank)

    def is_current(self) -> bool:
        """Whether the group has as many ranks as the partition."""
        return self.partition.size == self._backend.size

    def agreed_dtypes(
        self,
        act: str,
        split: list[int],
        kinds: list[str],
        layouts: Sequence[str] = (),
        facts: Facts = NO_FACTS,
    ) -> list[str | None]:
        """The dtypes of the gradients of some leaves; None if no rank has one. Collective.

        Args:
          split: the leaves.
          kinds: of each, dtype and shape of this rank's gradient, or "None".
          layouts: of each, how the elements lie where parts are taken in that order, with or without a gradient.
          facts: what must be equal on all ranks as well.

        Raises:
          MismatchError: ranks differ in more than what is None, on all ranks; names the first leaf.
        """
        self.require_current()
        names = [self._names[i] for i in split]
        if layouts:
            names += [f"{name} in memory" for name in names]
        mine = signature.Description(act, names, [*kinds, *layouts], list(range(len(names))))
        by = signature.Comparison(facts)
        everyone = signature.gather_if_different(self._backend, mine, timer(None), by=by)
        if everyone is not None:
            signature.check_same(self._backend.name, everyone, absent_is_fine=True)
            columns = zip(*(theirs.kinds[: len(split)] for theirs in everyone), strict=True)
            kinds = [next((what for what in column if what != signature.ABSENT), "") for column in columns]
        return [what.split(" ")[0] if what not in ("", signature.ABSENT) else None for what in kinds]

    def reduce_scatter(
        self, leaves: Sequence[Any], dtypes: Sequence[str | None], op: Op
    ) -> list[Flat | None]:
        """Reduce all leaves over all ranks. Collective.

        Args:
          leaves: the arrays; None counts as zeros.
          dtypes: of each; None for a leaf that no rank has.
          op: as for `Backend.reduce_scatter`.

        Returns:
          By leaf, the bytes of this rank's elements, which the next call overwrites; None for leaves of no rank.
        """
        self._backend._await_streams([leaf for leaf in leaves if leaf is not None], None)
        own: list[Flat | None] = [None] * len(leaves)
        works = []
        for key, buffer in self.partition.buffers.items():
            dtype = self._common_dtype(buffer, dtypes)
            if dtype is None or not buffer.block:
                continue
            flat, nbytes = self._flat(key, dtype, buffer.block * self._backend.size)
            for i, start in zip(buffer.leaves, buffer.starts, strict=True):
                whole = flat[start * nbytes : (start + self.partition.counts[i]) * nbytes]
                if leaves[i] is None:
                    whole[:] = 0
                elif len(whole):
                    _core.pack([leaves[i]], whole)
            blocks = as_dtype(flat, dtype).reshape(self._backend.size, buffer.block)
            works.append(self._backend.ireduce_scatter(blocks, op, out=blocks[self._backend.rank]))
            for i, start in zip(buffer.leaves, buffer.starts, strict=True):
                if dtypes[i] is not None:
                    part = self.part(i)
                    own[i] = flat[(start + part.start) * nbytes : (start + part.stop) * nbytes]
        for work in works:
            work.wait()
        return own

    def allgather(self, parts: Sequence[Any], infos: Sequence[ArrayInfo | None]) -> list[Flat | None]:
        """Join the parts of all ranks. Collective.

        Args:
          parts: by leaf, an array of this rank's elements, of any dtype; what has no info is left out.

        Returns:
          By leaf the bytes of all its elements, which are the caller's; None for what was left out.
        """
        self.require_current()
        self._backend._await_streams(
            [x for x, info in zip(parts, infos, strict=True) if info is not None], None
        )
        whole: list[Flat | None] = [None] * len(parts)
        works = []
        for key, buffer in self.partition.buffers.items():
            kinds = [None if (info := infos[i]) is None else info.dtype for i in buffer.leaves]
            for dtype in dict.fromkeys(kind for kind in kinds if kind is not None):
                mine, nbytes = self._flat(f"part of {key}", dtype, buffer.block)
                flat = self._backend.empty(len(mine) * self._backend.size, "uint8")
                for i, start, kind in zip(buffer.leaves, buffer.starts, kinds, strict=True):
                    if kind != dtype:
                        continue
                    part = self.part(i)
                    at = start + part.start - self._backend.rank * buffer.block
                    if part:
                        _core.pack([parts[i]], mine[at * nbytes : (at + len(part)) * nbytes])
                    whole[i] = flat[start * nbytes : (start + self.partition.counts[i]) * nbytes]
                if len(mine):
                    works.append(self._backend.iallgather(mine, out=flat.reshape(self._backend.size, -1)))
        for work in works:
            work.wait()
        return whole

    def gather(self, leaf: int, part: Any, dtype: str, root: int | None) -> Flat | None:
        """The bytes of a whole array like `leaf` from its parts. Collective.

        Args:
          leaf: which leaf of the partition.
          part: an array of this rank's elements; None where it has none.
          dtype: of the array.
          root: the rank that gets it, None elsewhere; None for all ranks.
        """
        self.require_current()
        mine: Flat = np.empty(len(self.part(leaf)) * _core.itemsize(dtype), np.uint8)
        if part is not None and len(mine):
            _core.pack([part], mine)
        return self._backend.allgatherv(mine) if root is None else self._backend.gatherv(mine, root)

    def require_current(self) -> None:
        """Raises InvalidArgumentError where the group has other ranks now."""
        if not self.is_current():
            raise InvalidArgumentError(
                f"ShardedOptimizer: the group has {self._backend.size} ranks now, and the state is divided among "
                f"{self.partition.size}; make the optimizer anew, and compile functions that use it anew"
            )

    def _common_dtype(self, buffer: Buffer, dtypes: Sequence[str | None]) -> str | None:
        found = {dtypes[i]: i for i in reversed(buffer.leaves) if dtypes[i] is not None}
        if len(found) > 1:
            one, other = [f"{signature.leaf_text(self._names[i])} is {dtype}" for dtype, i in found.items()][
                :2
            ]
            raise InvalidArgumentError(
                f"ShardedOptimizer: the gradient of {one} and that of {other}, but the parameters are of one dtype; "
                "cast the gradients"
            )
        return next(iter(found), None)

    def _flat(self, use: str, dtype: str, count: int) -> tuple[Flat, int]:
        """Memory for `count` elements that is kept for this use, as bytes, and the bytes of one element."""
        nbytes = _core.itemsize(dtype)
        key = use, dtype
        if key not in self._memory or len(self._memory[key]) != count * nbytes:
            self._memory[key] = self._backend.zeros(count * nbytes, "uint8")  # gaps between leaves stay zero
        return self._memory[key], nbytes

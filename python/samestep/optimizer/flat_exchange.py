"""Sharded updates: the part of the parameters that each rank updates, and the collectives to it and from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep import _core, arrays, trees
from samestep.errors import InvalidArgumentError
from samestep.group import compiled
from samestep.group.group import Group
from samestep.optimizer import probe
from samestep.optimizer.probe import part_shape
from samestep.reduce_ops import Op
from samestep.step.leaves import Flat, LeafSpec, specs_of, to_leaf
from samestep.trees import signature
from samestep.trees.facts import NO_FACTS, Facts
from samestep.trees.fusion import as_dtype

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
        self, act: str, kinds: Mapping[int, str], beside: Sequence[tuple[str, str]], facts: Facts = NO_FACTS
    ) -> dict[int, str]:
        """The dtypes of the gradients of some leaves, as far as a rank has one. Collective.

        Args:
          kinds: by leaf, dtype and shape of this rank's gradient, or "None".
          beside: name and what has to be alike on all ranks, with or without a gradient.
          facts: what must be equal on all ranks as well.

        Raises:
          MismatchError: ranks differ in more than what is None, on all ranks; names the first leaf.
        """
        self.require_current()
        names = [*(self._names[i] for i in kinds), *(name for name, _ in beside)]
        mine = signature.Description.of(act, names, [*kinds.values(), *(what for _, what in beside)])
        by = signature.Comparison(facts)
        everyone = signature.compare(self._backend, mine, by=by, absent_is_fine=True) or [mine]
        columns = zip(*(theirs.kinds[: len(kinds)] for theirs in everyone), strict=True)
        known = (
            (i, [what for what in column if what != signature.ABSENT])
            for i, column in zip(kinds, columns, strict=True)
        )
        return {i: found[0].split(" ")[0] for i, found in known if found}

    def reduce_scatter(self, leaves: Mapping[int, Any], dtypes: Mapping[int, str], op: Op) -> dict[int, Flat]:
        """Reduce leaves over all ranks. Collective.

        Args:
          leaves: the arrays by leaf; None counts as zeros.
          dtypes: of each leaf that some rank has.

        Returns:
          By leaf that some rank has, the bytes of this rank's elements, which the next call overwrites.
        """
        self._backend._await_streams([leaf for leaf in leaves.values() if leaf is not None], None)
        own: dict[int, Flat] = {}
        works = []
        for key, buffer in self.partition.buffers.items():
            dtype = self._common_dtype(buffer, dtypes)
            if dtype is None or not buffer.block:
                continue
            flat, nbytes = self._flat(key, dtype, buffer.block * self._backend.size)
            for i, start in zip(buffer.leaves, buffer.starts, strict=True):
                whole = flat[start * nbytes : (start + self.partition.counts[i]) * nbytes]
                if leaves.get(i) is None:
                    whole[:] = 0
                elif len(whole):
                    _core.pack([leaves[i]], whole)
                if i in dtypes:
                    part = self.part(i)
                    own[i] = flat[(start + part.start) * nbytes : (start + part.stop) * nbytes]
            blocks = as_dtype(flat, dtype).reshape(self._backend.size, buffer.block)
            works.append(self._backend.ireduce_scatter(blocks, op, out=blocks[self._backend.rank]))
        for work in works:
            work.wait()
        return own

    def allgather(self, parts: Mapping[int, Any]) -> dict[int, Flat]:
        """Join the parts of all ranks, arrays of any dtype by leaf. Collective.

        Returns:
          By leaf the bytes of all its elements, which are the caller's.
        """
        self.require_current()
        self._backend._await_streams(list(parts.values()), None)
        dtypes = {i: arrays.info(part).dtype for i, part in parts.items()}
        whole: dict[int, Flat] = {}
        works = []
        for key, buffer in self.partition.buffers.items():
            for dtype in dict.fromkeys(dtypes[i] for i in buffer.leaves if i in dtypes):
                mine, nbytes = self._flat(f"part of {key}", dtype, buffer.block)
                flat = self._backend.empty(len(mine) * self._backend.size, "uint8")
                for i, start in zip(buffer.leaves, buffer.starts, strict=True):
                    if dtypes.get(i) != dtype:
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
        """The bytes of a whole array like `leaf` from its parts, on `root` or (None) on all ranks. Collective.

        `part`: an array of this rank's elements; None where it has none.
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

    def _common_dtype(self, buffer: Buffer, dtypes: Mapping[int, str]) -> str | None:
        found = {dtypes[i]: i for i in reversed(buffer.leaves) if i in dtypes}
        if len(found) > 1:
            texts = [f"{signature.leaf_text(self._names[i])} is {dtype}" for dtype, i in found.items()]
            raise InvalidArgumentError(
                f"ShardedOptimizer: the gradient of {texts[0]} and that of {texts[1]}, but the parameters are of one "
                "dtype; cast the gradients"
            )
        return next(iter(found), None)

    def _flat(self, use: str, dtype: str, count: int) -> tuple[Flat, int]:
        """Memory for `count` elements that is kept for this use, as bytes, and the bytes of one element."""
        nbytes = _core.itemsize(dtype)
        key = use, dtype
        if key not in self._memory or len(self._memory[key]) != count * nbytes:
            self._memory[key] = self._backend.zeros(count * nbytes, "uint8")  # gaps between leaves stay zero
        return self._memory[key], nbytes


_ACT = "ShardedOptimizer"


class Plan(NamedTuple):
    """Parameters of one structure, and the part of them that this rank updates."""

    names: list[str]
    specs: list[LeafSpec]
    rebuild: Callable[[Sequence[Any]], Any]
    leaves: list[Any]
    """What is not an array; None for arrays."""
    exchange: FlatExchange

    def split(self) -> list[int]:
        """The leaves that ranks divide among them."""
        return [i for i, spec in enumerate(self.specs) if spec.group]

    def cut(self, flat: trees.Flat, act: str) -> Any:
        """This rank's part of a tree like the parameters."""
        if flat.names != self.names:
            raise InvalidArgumentError(f"{act}: the leaves are not those of the parameters")
        values = list(flat.leaves)
        for i in self.split():
            if values[i] is not None:
                values[i] = cut_part(values[i], self.specs[i].shape, self.held(i), self.names[i])
        return flat.rebuild(values)

    def held(self, i: int) -> range:
        """The elements of leaf i that the optimizer sees: this rank's part, or the first for an empty part.

        XLA may compile a function of several arrays to other roundings where one of them is empty.
        """
        part = self.exchange.part(i)
        return part if part or math.prod(self.specs[i].shape) == 0 else range(1)

    def is_whole(self) -> bool:
        """Whether this rank's part has the shapes of the parameters."""
        return all(self.part_shape(i) == self.specs[i].shape for i in self.split())

    def part_shape(self, i: int) -> tuple[int, ...]:
        """The shape of what `held` names."""
        return part_shape(self.specs[i].shape, len(self.held(i)))

    def with_leaves(self, make: Callable[[int, LeafSpec], Any]) -> Any:
        """A tree like the parameters with other arrays."""
        return self.rebuild(
            [make(i, spec) if spec.group else self.leaves[i] for i, spec in enumerate(self.specs)]
        )


def tree_specs(flat: trees.Flat) -> list[LeafSpec]:
    """What the leaves are; `group` is empty for what is not split among ranks."""
    tracers = {i: leaf for i, leaf in enumerate(flat.leaves) if compiled.is_traced([leaf])}
    leaves = (
        [None if i in tracers else leaf for i, leaf in enumerate(flat.leaves)] if tracers else flat.leaves
    )
    specs = specs_of(flat.names, leaves, _ACT)
    for i, leaf in tracers.items():
        dtype, shape = str(leaf.dtype), tuple(leaf.shape)
        specs[i] = LeafSpec(f"{dtype} {shape}", "jax", dtype, shape)
    return specs


def partition_of(specs: Sequence[LeafSpec], size: int) -> Partition:
    """The parts of leaves among `size` ranks."""
    return Partition(
        [math.prod(spec.shape) for spec in specs],
        [spec.dtype if spec.group else None for spec in specs],
        size,
    )


def cut_part(leaf: Any, shape: tuple[int, ...], part: range, name: str) -> Any:
    """Some elements of an array, with the same number of dimensions. A view if the library makes one."""
    array = leaf if hasattr(leaf, "reshape") else np.asarray(leaf)
    if tuple(array.shape) != shape:
        raise InvalidArgumentError(
            f"{_ACT}: {signature.leaf_text(name)} has shape {tuple(array.shape)}, the parameter {shape}"
        )
    if hasattr(array, "detach"):
        array = array.detach()
    return array.reshape(-1)[part.start : part.stop].reshape(part_shape(shape, len(part)))


def from_elements(elements: Flat, spec: LeafSpec, shape: tuple[int, ...]) -> Any:
    """A leaf of the library and dtype of `spec` from numbers in float64."""
    kind = np.dtype(spec.group)
    if spec.dtype.startswith("complex"):
        elements = np.repeat(elements, 2)
    if kind.kind != "f":
        elements = np.abs(np.clip(elements, -100, 100))
    library = "numpy" if spec.is_number else spec.library
    made = spec._replace(shape=shape, library=library, is_number=False, order=())
    return to_leaf(elements.astype(kind), made)


def require_elementwise(inner: Any, plan: Plan) -> None:
    """Check that the optimizer `inner` works element by element on these parameters; see `probe`."""
    split = plan.split()

    def trial(params: list[Flat], steps: list[list[Flat]], shapes: list[tuple[int, ...]]) -> probe.Steps:
        position = {i: k for k, i in enumerate(split)}

        def tree(values: list[Flat]) -> Any:
            return plan.with_leaves(
                lambda i, spec: from_elements(values[position[i]], spec, shapes[position[i]])
            )

        start = tree(params)
        state = inner.init(start)
        for grads in steps:
            updates, state = inner.update(tree(grads), state, start)
            leaves = trees.flatten(updates).leaves
            yield [probe.as_elements(leaves[i]) for i in split], probe.state_of(state)

    specs = [plan.specs[i] for i in split]
    probe.require_elementwise(type(inner).__name__, [plan.names[i] for i in split], specs, trial)

"""Parameters of one structure, and the part of them that each rank updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep import trees
from samestep.errors import InvalidArgumentError
from samestep.group import compiled
from samestep.optimizer import probe
from samestep.optimizer.flat_exchange import FlatExchange, Partition
from samestep.optimizer.probe import part_shape
from samestep.step.leaves import Flat, LeafSpec, specs_of, to_leaf
from samestep.trees import signature

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

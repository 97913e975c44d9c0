"""The leaves of trees of gradients, as slices of one flat array for each type in which they are added."""

from __future__ import annotations

import collections
import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep import arrays, trees
from samestep.arrays import of_torch
from samestep.errors import InvalidArgumentError
from samestep.trees import reducible, signature
from samestep.trees.allreduce import ADDED_AS, is_whole, why_not
from samestep.trees.structure import DEEPEST

Flat = np.ndarray[Any, Any]

_INTEGER_WORDS = 4  # of a sum of integers, so that none overflows: see csrc/kernels/weighted_sum.h


class LeafSpec(NamedTuple):
    """The description of a leaf that all ranks share."""

    what: str
    """dtype, shape and kind of memory of an array, or what else it is: as `signature.describe_leaves`."""
    library: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    is_number: bool = False
    order: tuple[int, ...] = ()
    """In which its elements are taken and added: `arrays.order_of`."""

    @property
    def group(self) -> str:
        """The dtype in which it is added; "" if it has no elements."""
        return ADDED_AS.get(self.dtype, "")

    @property
    def is_complex(self) -> bool:
        """Whether its elements are pairs of those in which it is added."""
        return self.dtype.startswith("complex")

    @property
    def is_viewed(self) -> bool:
        """Whether `to_leaf` returns a view of the sums."""
        is_plain = self.dtype == self.group or self.is_complex
        return bool(self.group) and is_plain and self.library in ("numpy", "torch")

    @property
    def n_elements(self) -> int:
        """Elements in the dtype in which it is added; a complex number is two."""
        return math.prod(self.shape) * (1 + self.is_complex)

    @property
    def n_words(self) -> int:
        """How many words the sum of such an element has."""
        return _INTEGER_WORDS if self.group == "int64" else 1


def present_in(specs: Sequence[LeafSpec]) -> int:
    """The leaves that hold elements, as a bit mask."""
    return sum(1 << i for i, spec in enumerate(specs) if spec.group)


class Slices(NamedTuple):
    """The leaves in one flat array."""

    leaves: list[int]
    starts: list[int]
    """The first element of each leaf, and the number of all elements."""


class Layout:
    """The position of each leaf: in one flat array for each dtype in which leaves are added, one after another."""

    def __init__(self, names: Sequence[str], specs: Sequence[LeafSpec]) -> None:
        self.names, self.specs = list(names), list(specs)
        self.groups: dict[str, Slices] = {}
        """By dtype of the sums."""
        self._starts: list[int] = []
        for i, spec in enumerate(specs):
            if not spec.group:
                self._starts.append(0)
                continue
            slices = self.groups.setdefault(spec.group, Slices([], [0]))
            slices.leaves.append(i)
            self._starts.append(slices.starts[-1])
            slices.starts.append(slices.starts[-1] + spec.n_elements * spec.n_words)
        self.viewed = {spec.group for spec in specs if spec.is_viewed}
        """The flat arrays that belong to the results once `to_leaf` has made these."""

    @functools.cached_property
    def digest(self) -> int:
        """A 64-bit hash of everything that must agree on all ranks; never 0."""
        return 1 + (signature.digest_of("\0".join([*self.names, *(spec.what for spec in self.specs)])) >> 8)

    @functools.cached_property
    def present(self) -> int:
        """The leaves that are arrays or numbers, as a bit mask: bit i for leaf i."""
        return present_in(self.specs)

    def part(self, flats: dict[str, Flat], i: int) -> Flat:
        """The sums of leaf i."""
        spec = self.specs[i]
        return flats[spec.group][self._starts[i] :][: spec.n_elements * spec.n_words]

    def mean(self, flats: dict[str, Flat], i: int) -> Flat:
        """The elements of leaf i, after `divide`. A view if sums have one word."""
        return np.ascontiguousarray(self.part(flats, i)[:: self.specs[i].n_words])

    def with_absent_from(self, specs: Sequence[LeafSpec]) -> Layout:
        """This layout, with leaves that were None so far taken from `specs`. Returns itself if nothing is new."""
        filled = [
            new if old.what == signature.ABSENT else old for old, new in zip(self.specs, specs, strict=True)
        ]
        return self if filled == self.specs else Layout(self.names, filled)


def describe(names: Sequence[str], leaves: Sequence[Any], act: str) -> list[LeafSpec]:
    """Describe each leaf; raise InvalidArgumentError for one that cannot be averaged, and may not pass as it is."""
    specs = specs_of(names, leaves, act)
    if (refused := signature.first_refused(names, [spec.what for spec in specs])) is not None:
        raise InvalidArgumentError(f"{act}: {signature.leaf_text(refused[0])}: {refused[1]}")
    for name, spec in zip(names, specs, strict=True):
        if spec.dtype and not spec.group:
            raise InvalidArgumentError(
                f"{act}: {signature.leaf_text(name)} has dtype {spec.dtype}, which has no mean"
            )
    return specs


def specs_of(names: Sequence[str], leaves: Sequence[Any], act: str) -> list[LeafSpec]:
    """What each leaf is, whether or not it has a mean."""
    values, numbers, looks = reducible.describe_leaves(names, leaves, act)
    is_number = set(numbers)
    specs = []
    for i, (what, info) in enumerate(zip(looks.kinds, looks.infos, strict=True)):
        if info is None or info.dtype not in ADDED_AS:
            specs.append(LeafSpec(what, dtype=info.dtype if info is not None else ""))
            continue
        library = "number" if i in is_number else arrays.of(values[i]).name
        order = arrays.order_of(values[i]) if info.device != "cpu" else ()
        specs.append(LeafSpec(what, library, info.dtype, info.shape, i in is_number, order))
    return specs


def _narrowed(flat: Flat, spec: LeafSpec) -> Flat:
    """The sums in the dtype of the leaf, rounded to the nearest, ties to even."""
    if spec.dtype == spec.group:
        return flat
    if spec.is_complex:
        return flat.view(np.dtype(spec.dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        return _rounded_to_bfloat16(flat) if spec.dtype == "bfloat16" else flat.astype(np.dtype(spec.dtype))


def _rounded_to_bfloat16(flat: Flat) -> Flat:
    """The bits of the rounded elements."""
    bits = flat.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)  # rounding could turn a NaN into an infinity
    result: Flat = np.where(np.isnan(flat), quiet, rounded).astype(np.uint16)
    return result


def to_leaf(flat: Flat, spec: LeafSpec, like: Any = None, *, device: int | None = None) -> Any:
    """Make a leaf of the library and dtype of `spec` from the elements of the sums.

    Args:
      flat: in the dtype of the sums; may become the memory of the result.
      like: for a number, one of the type to return; for an array, `arrays.sharding_of` the leaf.
      device: as for `Library.new`.
    """
    elements = _narrowed(flat, spec)
    if spec.is_number:
        value = elements.reshape(())[()]
        return type(like)(value) if like is not None else value.item()
    if spec.library == "numpy" and spec.dtype != "bfloat16":
        return elements.reshape(spec.shape)
    if spec.library == "torch" and spec.n_elements:
        return of_torch.of_bytes(elements.view(np.uint8), spec.dtype).reshape(spec.shape)
    order = spec.order if arrays.named(spec.library).computes else ()
    if spec.order != order:
        elements = _row_major(elements, spec)
    data = elements.view(np.uint8)
    return arrays.from_bytes(data, spec.library, spec.dtype, spec.shape, device, order, like=like)


def _row_major(elements: Flat, spec: LeafSpec) -> Flat:
    """The elements of a leaf that is not row-major, in row-major order."""
    axes = [*(axis for axis, extent in enumerate(spec.shape) if extent == 1), *spec.order]
    lying = elements.reshape([spec.shape[axis] for axis in axes])
    return np.ascontiguousarray(lying.transpose(np.argsort(axes))).reshape(-1)


def identity_of(group: str) -> Any:
    """The identity of addition to the bit: -0.0, because -0.0 + 0.0 is 0.0."""
    return np.dtype(group).type(-0.0 if group.startswith("float") else 0)


_USUAL = (dict, list, tuple, collections.OrderedDict)


def gradients_of(grads: Any, act: str = "") -> Any:
    """The tree that `grads` stands for: of a torch module the `.grad` of its parameters.

    Raises:
      InvalidArgumentError: `act` takes gradients alone, and the tree begins with a module, a parameter or an optimizer.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return grads
    if isinstance(grads, torch.nn.Module):
        return {name: parameter.grad for name, parameter in grads.named_parameters()}
    first = grads
    for _ in range(DEEPEST):
        if type(first) not in _USUAL or not first:
            break
        first = next(iter(first if isinstance(first, (list, tuple)) else first.values()))
    if (
        act
        and type(first) not in (torch.Tensor, np.ndarray)  # cheaper than to ask the class Parameter
        and isinstance(first, (torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer))
    ):
        raise InvalidArgumentError(
            f"{act}: the tree begins with parameters ({type(first).__name__}), not with gradients; pass one module by "
            "itself, or its gradients, {name: p.grad for name, p in module.named_parameters()}"
        )
    return grads


def rebuild_of(tree: Any, flat: trees.Flat) -> Callable[[Iterable[Any]], Any]:
    """`flat.rebuild`, which keeps the leaves of `tree` alive only if other containers than the usual ones need it."""
    if not trees.is_plain(tree):
        return flat.rebuild
    return trees.flatten(flat.rebuild([None] * len(flat.leaves))).rebuild


def examples(leaves: Sequence[Any], specs: Sequence[LeafSpec]) -> list[Any]:
    """The properties of the leaves that `mean` needs, without the arrays."""
    return [
        type(leaf)(0) if spec.is_number else arrays.sharding_of(leaf) if spec.group else leaf
        for leaf, spec in zip(leaves, specs, strict=True)
    ]


def require_weight(specs: Sequence[LeafSpec], names: Sequence[str], weight: float) -> None:
    """Raise InvalidArgumentError for the first leaf that cannot be multiplied by a weight that is not zero."""
    if is_whole(weight):
        return
    for spec, name in zip(specs, names, strict=True):
        if spec.group and (why := why_not(spec.dtype, weight)):
            raise InvalidArgumentError(f"Accumulator.add: {signature.leaf_text(name)} {why}")

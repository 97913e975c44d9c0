"""Tests whether an optimizer works element by element, on a small problem, whole and in two parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from samestep import _core
from samestep.errors import InvalidArgumentError
from samestep.step.leaves import Flat, Layout, LeafSpec, describe
from samestep.step.partial import Memory, Partial, Term
from samestep.trees.signature import leaf_text

_MOST_EXTENT = 130  # above the 128 from which Adafactor and its kin factor a matrix
_MOST_ELEMENTS = 160_000
_HALVES = ("float16", "bfloat16")
HOW_TO_VOUCH = "pass elementwise=True if you know that it works element by element"

Trial = Callable[[list[Flat], list[list[Flat]], list[tuple[int, ...]]], list[list[Flat]]]


def small_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of as many dimensions for the trial.

    Example:
      >>> small_shape((50_000, 4096)), small_shape((512, 512, 3, 3)), small_shape((7,))
      ((130, 130), (130, 130, 3, 3), (7,))
    """
    small = [min(extent, _MOST_EXTENT) for extent in shape]
    while np.prod(small, dtype=np.int64) > _MOST_ELEMENTS:
        small[int(np.argmax(small))] //= 2
    return tuple(small)


def require_elementwise(what: str, names: Sequence[str], specs: Sequence[LeafSpec], trial: Trial) -> None:
    """Check that updating all leaves in two parts gives the same as updating them whole.

    It cannot see a dependence that begins after three steps, at sizes that the trial does not have, or at gradients
    outside of 1e-8 to 1e4 (half types: 1e-4 to 40).

    Args:
      what: the optimizer, for the error.
      names: of the leaves.
      specs: of the leaves.
      trial: `trial(params, gradients by step, shapes)` runs the optimizer on leaves of these elements and shapes, and
        returns by step what it adds to each, as float64.

    Raises:
      InvalidArgumentError: they are not; names the first leaf.
    """
    rng = np.random.default_rng(1)
    shapes = [small_shape(spec.shape) for spec in specs]
    counts = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    cuts = [_cut_of(shape, i % 2) for i, shape in enumerate(shapes)]  # single elements are in either half
    rough = any(spec.dtype in _HALVES for spec in specs)
    params = [_elements(rng, count, cut, 1.0) for count, cut in zip(counts, cuts, strict=True)]
    grads = [
        [_elements(rng, count, cut, scale) for count, cut in zip(counts, cuts, strict=True)]
        for scale in ((1e-3, 1.0, 1e1) if rough else (1e-8, 1.0, 1e4))
    ]
    try:
        with np.errstate(all="ignore"):
            whole = trial(params, grads, shapes)
            by_part = []
            for pick in (slice(None, -1), slice(1, None)):  # of the edges of both parts
                edges = [slice(*[0, cut, count][pick]) for cut, count in zip(cuts, counts, strict=True)]
                parts = [leaf[edge] for leaf, edge in zip(params, edges, strict=True)]
                steps = [[leaf[edge] for leaf, edge in zip(step, edges, strict=True)] for step in grads]
                forms = [part_shape(shape, len(part)) for shape, part in zip(shapes, parts, strict=True)]
                by_part.append(trial(parts, steps, forms))
    except Exception as error:
        raise InvalidArgumentError(
            f"ShardedOptimizer: the update of {what} failed in a trial on parts of the parameters "
            f"({type(error).__name__}: {error}); {HOW_TO_VOUCH}"
        ) from error
    tolerance = 3e-2 if rough else 1e-3
    for step, (got, left, right) in enumerate(zip(whole, *by_part, strict=True)):
        for name, all_of_it, first, second in zip(names, got, left, right, strict=True):
            if not _is_close(all_of_it, np.concatenate([first, second]), tolerance):
                raise InvalidArgumentError(
                    f"ShardedOptimizer: {what} does not update element by element: in step {step} of a trial, parts "
                    f"of {leaf_text(name)} were updated otherwise than the whole, as with clipping by a global norm, "
                    "layer-wise rates or factored moments. Use DistributedOptimizer, or take that out of the "
                    f"optimizer; {HOW_TO_VOUCH}"
                )


def part_shape(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The shape of a part of `count` elements: as many dimensions, so that rules by dimension stay.

    Example:
      >>> part_shape((30, 40), 64), part_shape((), 1)
      ((1, 64), (1,))
    """
    return (1,) * (len(shape) - 1) + (count,)


def _cut_of(shape: tuple[int, ...], which: int) -> int:
    """Where the trial cuts a leaf: near its middle, within a row, as parts of whole rows hide what works row by row.

    Example:
      >>> _cut_of((7,), 0), _cut_of((2, 3), 0), _cut_of((2, 1), 0), _cut_of((), 1)
      (4, 4, 2, 0)
    """
    count = int(np.prod(shape, dtype=np.int64))
    cut = (count + 1 - which) // 2
    is_between_rows = len(shape) > 1 and count > 1 and cut % shape[-1] == 0
    return cut + is_between_rows


def _elements(rng: np.random.Generator, count: int, cut: int, scale: float) -> Flat:
    """Random ones; those of the second part are larger, so that the norms of the parts differ."""
    elements = rng.standard_normal(count) * scale
    elements[cut:] *= 4
    return elements


def _is_close(a: Flat, b: Flat, tolerance: float) -> bool:
    finite = a[np.isfinite(a)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True))


def as_elements(leaf: Any) -> Flat:
    """What an array or a number of any library holds, flat, as float64."""
    layout = Layout([""], describe([""], [leaf], "ShardedOptimizer"))
    sums = Partial(Term([np.asarray(leaf) if layout.specs[0].is_number else leaf], 1.0))
    flats = sums.settled(layout, Memory(np.empty))
    for flat in flats.values():
        _core.divide_in_place(flat, 1.0)
    return layout.mean(flats, 0).astype(np.float64)

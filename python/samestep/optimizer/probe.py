"""Tests whether an optimizer works element by element, on a small problem, whole and in two parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from samestep import _core, arrays, trees
from samestep.errors import InvalidArgumentError
from samestep.step.combine import Memory, Partial, Term
from samestep.step.leaves import Flat, Layout, LeafSpec, describe
from samestep.step.state_hash import hash_of
from samestep.trees.signature import leaf_text

_MOST_EXTENT = 130  # above the 128 from which Adafactor and its kin factor a matrix
_MOST_ELEMENTS = 160_000
_HALVES = ("float16", "bfloat16")
HOW_TO_VOUCH = "pass elementwise=True if you know that it works element by element"

State = dict[str, tuple[tuple[int, ...], bytes]]
"""Shapes and bits of what an optimizer holds besides the parameters, by name."""
Steps = Iterator[tuple[list[Flat], State]]
Trial = Callable[[list[Flat], list[list[Flat]], list[tuple[int, ...]]], Steps]


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

    So must what it holds for all elements together, such as a count or an estimate: ranks would have different ones.
    The last step has NaN in one part alone, which may not keep the other from its step. It cannot see a dependence that
    begins after four steps, at sizes that the trial does not have, or at gradients outside of 1e-8 to 1e4 (half types:
    1e-4 to 40).

    Args:
      trial: `trial(params, gradients by step, shapes)` runs the optimizer on leaves of these elements and shapes, and
        yields for each step what it adds to each, as float64, and what it holds then.

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
        for scale in ((1e-3, 1.0, 1e1, 1.0) if rough else (1e-8, 1.0, 1e4, 1.0))
    ]
    for grad, cut in zip(grads[-1], cuts, strict=True):
        grad[: min(cut, 1)] = np.nan
    tolerance = 3e-2 if rough else 1e-3
    try:
        with np.errstate(all="ignore"):
            whole = trial(params, grads, shapes)
            of_parts = []
            for pick in (slice(None, -1), slice(1, None)):  # of the edges of both parts
                edges = [slice(*[0, cut, count][pick]) for cut, count in zip(cuts, counts, strict=True)]
                parts = [leaf[edge] for leaf, edge in zip(params, edges, strict=True)]
                steps = [[leaf[edge] for leaf, edge in zip(step, edges, strict=True)] for step in grads]
                forms = [part_shape(shape, len(part)) for shape, part in zip(shapes, parts, strict=True)]
                of_parts.append(trial(parts, steps, forms))
            for step, results in enumerate(zip(whole, *of_parts, strict=True)):
                # Flags of NaN may differ.
                if difference := _difference(names, results, tolerance, with_state=step < len(grads) - 1):
                    break
    except Exception as error:
        raise InvalidArgumentError(
            f"ShardedOptimizer: the update of {what} failed in a trial on parts of the parameters "
            f"({type(error).__name__}: {error}); {HOW_TO_VOUCH}"
        ) from error
    if difference:
        raise InvalidArgumentError(
            f"ShardedOptimizer: {what} does not update element by element: in step {step} of a trial, {difference}. "
            f"Use DistributedOptimizer, or take that out of the optimizer; {HOW_TO_VOUCH}"
        )


def _difference(
    names: Sequence[str], results: Sequence[tuple[list[Flat], State]], tolerance: float, *, with_state: bool
) -> str:
    """What a step on the parts did otherwise than one on the whole, which comes first; "" for nothing."""
    for name, whole, *parts in zip(names, *(updates for updates, _ in results), strict=True):
        if not _is_close(whole, np.concatenate(parts), tolerance):
            return (
                f"parts of {leaf_text(name)} were updated otherwise than the whole, as with clipping by a global norm, "
                "layer-wise rates, factored moments or steps that are skipped"
            )
    whole_state, *states = (state for _, state in results)
    for name, held in whole_state.items() if with_state else ():
        of_parts = [state.get(name, held) for state in states]
        if all(shape == held[0] for shape, _ in of_parts) and of_parts != [held, held]:
            return (
                f"{leaf_text(name)} of its state was another for the parts than for the whole, as are rates that are "
                "estimated from all gradients"
            )
    return ""


def state_of(tree: Any) -> State:
    """Shapes and bits of the numbers and arrays of a tree, by name."""
    flat = trees.flatten(tree)
    return {
        name: (arrays.info(leaf).shape if arrays.is_array(leaf) else (), hash_of(leaf))
        for name, leaf in zip(flat.names, flat.leaves, strict=True)
    }


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

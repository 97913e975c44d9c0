"""New arrays of the same library to receive into, and their conversion to what the caller gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from samestep import _core
from samestep._core import ArrayInfo
from samestep.arrays.describe import info, order_of
from samestep.arrays.libraries import named, of
from samestep.errors import InvalidArgumentError


def new_in_order(
    library: str, dtype: str, shape: tuple[int, ...], order: Sequence[int], device: int | None
) -> Any:
    """As `Library.new`, with the axes in the order in memory that `_core.memory_order` names."""
    if not order:
        return named(library).new(dtype, shape, device)
    axes = [*(axis for axis, extent in enumerate(shape) if extent == 1), *order]
    lying = named(library).new(dtype, tuple(shape[axis] for axis in axes), device)
    places = tuple(axes.index(axis) for axis in range(len(shape)))
    return (lying.permute if hasattr(lying, "permute") else lying.transpose)(places)


def new_like(x: Any, shape: tuple[int, ...] | None = None) -> Any:
    """A new writable array to receive into, with the dtype, library, device and (unless given) shape of `x`."""
    known, row = info(x), of(x)
    return row.new(known.dtype, known.shape if shape is None else shape, row.place(x))


def fill_with_zeros(x: Any) -> None:
    """Set all elements of an array that `new_like` or `new_in_order` made."""
    _core.unpack(np.zeros(info(x).nbytes, np.uint8), [x], as_they_lie=True)


def converts(x: Any) -> bool:
    """Whether `x` holds 16-bit floats in device memory which its library can convert."""
    known = info(x)
    return known.device != "cpu" and known.dtype in ("float16", "bfloat16") and of(x).computes


def targets(xs: Sequence[Any], infos: Sequence[ArrayInfo]) -> list[Any]:
    """Where results for arrays go: the arrays, or new ones for those that cannot be written."""
    return [x if known.writable else new_like(x) for x, known in zip(xs, infos, strict=True)]


def deliver(xs: Any, infos: Sequence[ArrayInfo], which: Iterable[int], written: Sequence[Any]) -> None:
    """Put what `targets` gave for some arrays of a list, and now holds results, in place of those not writable."""
    for i, target in zip(which, written, strict=True):
        if not infos[i].writable:
            xs[i] = of(xs[i]).finish(target, like=xs[i])


def copy_if_overlapping(x: Any, out: Any, verb: str) -> Any:
    """`x`, or a copy of it if writing to `out` would change it.

    Raises:
      InvalidArgumentError: they overlap in device memory.
    """
    try:
        overlap = _core.share_memory(x, out)
    except (TypeError, InvalidArgumentError):
        info(x, verb)
        info(out, verb)
        raise
    if not overlap:
        return x
    if info(x).device != "cpu":
        raise InvalidArgumentError(f"{verb}: x and out overlap in device memory; pass a copy of x")
    own = new_like(x)
    copy(x, own, verb)
    return own


def copy(x: Any, out: Any, verb: str) -> None:
    """Copy the elements of `x` into `out`, whichever libraries and layouts they have.

    Raises:
      InvalidArgumentError: `out` has another dtype or shape, or cannot be written.
    """
    source, target = info(x, verb), info(out, verb)
    if (source.dtype, source.shape) != (target.dtype, target.shape):
        raise InvalidArgumentError(
            f"{verb}: out is {target.dtype}{list(target.shape)} but the input is {source.dtype}{list(source.shape)}"
        )
    if not target.writable:
        raise InvalidArgumentError(
            f"{verb}: out: the array is read-only; pass a writable copy such as np.array(x)"
        )
    if source.device != "cpu" and target.device != "cpu" and _core.copy_on_device(x, out):
        return
    block = np.empty(source.nbytes, np.uint8)
    _core.pack([x], block, as_they_lie=True)
    if order_of(x) != order_of(out):
        lying = np.empty_like(block)
        _elements(lying, out)[...] = _elements(block, x)
        block = lying
    _core.unpack(block, [out], as_they_lie=True)


def _elements(block: np.ndarray[Any, Any], x: Any) -> np.ndarray[Any, Any]:
    """The bytes of `block`, into which `x` is packed in memory order, as elements with the axes of `x`."""
    known = info(x)
    kind = np.dtype((np.void, _core.itemsize(known.dtype)))
    strides = known.strides if order_of(x) else None
    elements: np.ndarray[Any, Any] = np.ndarray(known.shape, kind, block, strides=strides)
    return elements

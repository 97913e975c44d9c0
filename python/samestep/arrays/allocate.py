"""New arrays of the same library to receive into, and their conversion to what the caller gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from samestep import _core
from samestep._core import ArrayInfo
from samestep.arrays.describe import info, is_array, order_of
from samestep.arrays.libraries import named, of
from samestep.arrays.of_jax import sharding_of
from samestep.errors import InvalidArgumentError


def from_bytes(  # noqa: PLR0917 - what an array is
    data: np.ndarray[Any, Any] | None,
    library: str,
    dtype: str,
    shape: Sequence[int],
    device: int | None,
    order: Sequence[int] = (),
    *,
    like: Any = None,
) -> Any:
    """An array of its own from the bytes of its elements as they lie in memory; None: of zeros.

    It is on `device` as for `Library.new`; JAX commits it to where it has committed `like`, or to this sharding.
    `order`: of the axes in memory, as `_core.memory_order` names it, of libraries that compute on devices alone.
    """
    row = named(library)
    ones = [axis for axis, extent in enumerate(shape) if extent == 1]
    axes = [*ones, *order] if order else range(len(shape))
    made = row.new(dtype, tuple(shape[axis] for axis in axes), device)
    _core.unpack(np.zeros(info(made).nbytes, np.uint8) if data is None else data, [made])
    if order:
        places = tuple(axes.index(axis) for axis in range(len(shape)))
        made = (made.permute if hasattr(made, "permute") else made.transpose)(places)
    return row.finish(made, sharding=sharding_of(like) if is_array(like) else like)


def like_bytes(data: np.ndarray[Any, Any], like: Any, shape: tuple[int, ...]) -> Any:
    """An array of its own from the bytes of its elements, of the dtype and library of `like` and where that lies."""
    row = of(like)
    made = row.like(like, shape)
    _core.unpack(data, [made])
    return row.finish(made, like=like)


def converts(x: Any) -> bool:
    """Whether `x` holds 16-bit floats in device memory which its library can convert."""
    known = info(x)
    return known.device != "cpu" and known.dtype in ("float16", "bfloat16") and of(x).computes


def targets(xs: Sequence[Any], infos: Sequence[ArrayInfo]) -> list[Any]:
    """Where results for arrays go: the arrays, or new ones for those that cannot be written."""
    return [x if known.writable else of(x).like(x) for x, known in zip(xs, infos, strict=True)]


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
    own = of(x).like(x)
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

"""Whether an object is an array, and its properties, for any library; what is asked of a library."""

from __future__ import annotations

import array as _array
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from samestep import _core
from samestep._core import ArrayInfo
from samestep._util.dtypes import numpy_dtype
from samestep._util.text import short_repr
from samestep.errors import InvalidArgumentError
from samestep.gpu.device_array import FlatView

_FLOAT0 = np.dtype([("float0", np.void, 0)])
_MAX_NBYTES = 1 << 57  # no machine gives a process more addresses


def is_array(x: Any) -> bool:
    """Whether `x` is an array: not a Python or NumPy scalar, not bytes or str, not a list, and not `is_float0`.

    Example:
      >>> is_array(np.zeros(3)), is_array(np.float32(1)), is_array([1.0])
      (True, False, False)
    """
    if isinstance(x, (np.ndarray, _array.array, memoryview, bytearray)):
        return not is_float0(x)
    if isinstance(x, (np.generic, type)):
        return False
    return hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")


def is_float0(x: Any) -> bool:
    """Whether `x` is what JAX gives as the gradient of integers: its elements have no bytes, so it equals its like."""
    return bool(getattr(x, "dtype", None) == _FLOAT0)


def info(x: Any, verb: str | None = None) -> ArrayInfo:
    """Describe an array.

    Raises:
      TypeError: `x` is not an array.
      InvalidArgumentError: its elements cannot be sent (dtype, byte order, layout).
    """
    try:
        return _core.view_info(x)
    except (TypeError, InvalidArgumentError) as error:
        if verb is None:
            raise
        raise type(error)(f"{verb}: {error}") from error


def device_of(x: Any) -> int | None:
    """Index of an array's device; None for the host, and for an array without elements."""
    known = _core.view_info(x)
    if known.device == "cpu":
        return None
    if known.device_index >= 0:
        return known.device_index
    if not known.address:
        return None
    from samestep.gpu import runtime

    return runtime.current_gpu(known.device).device_of(known.address)


def order_of(x: Any) -> tuple[int, ...]:
    """The axes of an array in the order in which its elements are taken, as `_core.memory_order`; () if row-major.

    Elements in device memory are taken in memory order, those in host memory always in row-major order.
    """
    known = info(x)
    return () if known.device == "cpu" or known.contiguous else _core.memory_order(x) or ()


def readable(x: Any, verb: str) -> tuple[Any, bool]:
    """Convert a value to an array: arrays are returned unchanged, numbers as 0-d arrays.

    Returns:
      The array, and whether `x` was a number, so that the result should be one.
    """
    if isinstance(x, (np.generic, bool, int, float, complex)):
        value = np.array(x)
        if value.dtype == object:
            raise InvalidArgumentError(
                f"{verb}: {x!r} does not fit 64 bits; send it with the ..._object verbs"
            )
        return value, True
    return x, False


def extents(shape: Any, itemsize: int, verb: str) -> tuple[int, ...]:
    """The shape of a new array whose elements have `itemsize` bytes: of one extent, or several.

    Example:
      >>> extents(3, 8, "empty"), extents([2, np.int64(5)], 8, "empty")
      ((3,), (2, 5))
    """
    try:
        result = tuple(map(operator.index, _listed(shape)))
    except TypeError:
        raise TypeError(
            f"{verb}: shape must be an int or a sequence of ints, got {short_repr(shape)}"
        ) from None
    if result and min(result) < 0:
        raise InvalidArgumentError(f"{verb}: shape {short_repr(shape)} has a negative extent")
    if math.prod(filter(None, result)) * itemsize > _MAX_NBYTES:
        raise InvalidArgumentError(
            f"{verb}: shape {short_repr(shape)} of {itemsize} bytes for each element is more than any memory holds"
        )
    return result


def _listed(shape: Any) -> Any:
    if isinstance(shape, (str, bytes)):
        return [shape]
    try:
        return list(shape)
    except TypeError:  # a number, or an array of no dimension
        return [shape]


def named_stream(x: Any, unnamed: Callable[[], int] = int) -> int | None:
    """The stream in `__cuda_array_interface__`; where that names none, the `unnamed` one, else the default stream."""
    interface = getattr(x, "__cuda_array_interface__", None)
    if not isinstance(interface, dict) or "stream" not in interface:
        return unnamed()
    stream = interface["stream"]
    # The interface numbers the default stream 1. CUDA also accepts 0; for ROCm it is 0, and 1 may be invalid.
    return None if stream is None else int(stream) if stream != 1 else 0


@dataclass(frozen=True)
class Library:
    """What is asked of a library. The defaults are right where its arrays may be answered with memory of NumPy."""

    name: str
    """What ranks call it: the module with its functions; for device memory "torch gpu", "jax gpu", "cupy" or "gpu"."""
    holds: Callable[[Any], bool] = lambda x: False
    """Whether an array is of this row, where its class tells that."""
    mutable: bool = False
    """Its arrays are written in place."""
    computes: bool = False
    """It can be asked for arrays in device memory that are not row-major, and to convert 16-bit floats."""
    new: Callable[..., Any] = lambda dtype, shape, device=None: np.empty(shape, numpy_dtype(dtype))
    """A new writable array of `(dtype, shape, device)` to receive into; `finish` makes the result of it.

    Device memory is of `device`, an index or what `place` says. None: of the current device, which each thread has its
    own of, at first device 0.
    """
    place: Callable[[Any], Any] = device_of
    """Where an array lies, for `new`."""
    finish: Callable[..., Any] = lambda received, **_: received
    """What was `received` into a new array, as an array of the library.

    For JAX it is committed to `sharding`, or lies where the array `like` does.
    """
    flat: Callable[[Any], Any] = lambda x: (
        FlatView(x, math.prod(info(x).shape)) if hasattr(x, "__cuda_array_interface__") else None
    )
    """The memory of a contiguous array as a buffer of one dimension; None if the library is not asked for one."""
    stream: Callable[[Any], int | None] = named_stream
    """See `libraries.stream_of`."""
    widen: Callable[[Any], Any] = lambda x: x.astype("float32")
    """A float32 copy with the axes in the same order in memory, made in the stream in which the library works."""
    store_rounded: Callable[[Any, Any], None] = lambda wide, out: out.__setitem__(..., wide)
    """Round each element of a float32 array once, to the nearest of the dtype of `out`, an array of that shape."""

    def like(self, x: Any, shape: tuple[int, ...] | None = None) -> Any:
        """A new array to receive into, with the dtype, device and (unless given) shape of an array of this row."""
        known = info(x)
        return self.new(known.dtype, known.shape if shape is None else shape, self.place(x))

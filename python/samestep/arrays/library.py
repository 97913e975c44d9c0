"""A row of the table of array libraries, and what most libraries have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from samestep._util.dtypes import numpy_dtype
from samestep.arrays.describe import device_of, info
from samestep.gpu.device_array import FlatView


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

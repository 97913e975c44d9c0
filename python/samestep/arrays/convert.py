"""Conversion of 16-bit floats to float32 and back, on the device, by the library of the array."""

from __future__ import annotations

from typing import Any

from samestep.arrays.describe import info, library_of

_CONVERTING = ("torch gpu", "cupy")


def converts(x: Any) -> bool:
    """Whether `x` holds 16-bit floats in device memory which its library can convert."""
    known = info(x)
    return known.device != "cpu" and known.dtype in ("float16", "bfloat16") and library_of(x) in _CONVERTING


def to_float32(x: Any) -> Any:
    """A float32 copy of an array that `converts`, with the axes in the same order in memory.

    It is made in the stream in which the library works.
    """
    return x.detach().float() if library_of(x) == "torch gpu" else x.astype("float32")


def store_rounded(wide: Any, out: Any) -> None:
    """Round each element of a float32 array once, to the nearest of the dtype of `out`, an array of the same shape."""
    if library_of(out) == "torch gpu":
        out.detach().copy_(wide)
    else:
        out[...] = wide

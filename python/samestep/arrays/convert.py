"""Conversion of 16-bit floats to float32 and back, on the device, by the library of the array."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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


def gathers(x: Any) -> bool:
    """Whether `gather` takes `x`: a library copies many of its arrays in device memory by one kernel."""
    # Under a private name that torch's own FSDP uses, too.
    return library_of(x) == "torch gpu" and hasattr(sys.modules["torch"], "_foreach_copy_")


def gather(xs: Sequence[Any], dtype: str) -> Any:
    """The elements of dense arrays of one dtype, as they lie, in one new array of `dtype`.

    The library copies them in the stream in which it works.
    """
    torch = sys.modules["torch"]
    flat = torch.empty(sum(x.numel() for x in xs), dtype=getattr(torch, dtype), device=xs[0].device)
    torch._foreach_copy_(_parts(flat, xs), list(map(_row, xs)))
    return flat


def scatter(flat: Any, xs: Sequence[Any]) -> None:
    """The reverse of `gather`; rounds each element to the nearest of the dtype of `xs`."""
    sys.modules["torch"]._foreach_copy_(list(map(_row, xs)), _parts(flat, xs))


def _parts(flat: Any, xs: Sequence[Any]) -> list[Any]:
    return list(flat.split([x.numel() for x in xs]))


def _row(x: Any) -> Any:
    return x.detach().as_strided((x.numel(),), (1,))

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


def gathers(xs: Sequence[Any], dtype: str) -> bool:
    """Whether `gather` takes arrays of `dtype`: torch copies tensors in device memory by one kernel, of most dtypes."""
    if (
        len(xs) < 2
        or dtype in ("uint16", "uint32", "uint64")
        or any(library_of(x) != "torch gpu" for x in xs)
    ):
        return False
    torch = sys.modules["torch"]
    # Private names, see docs/design/0015-nccl.md. Without them the arrays are a group of operations.
    return hasattr(torch, "_foreach_copy_") and hasattr(
        getattr(torch, "_utils", None), "_unflatten_dense_tensors"
    )


def gather(xs: Sequence[Any], dtype: str) -> Any:
    """The elements of two or more dense arrays of one dtype, as they lie, in one new array of `dtype`.

    The library copies them in the stream in which it works.
    """
    torch = sys.modules["torch"]
    with torch.no_grad():
        return torch._utils._flatten_dense_tensors(_in_rows(xs)).to(getattr(torch, dtype))


def scatter(flat: Any, xs: Sequence[Any]) -> None:
    """The reverse of `gather`; rounds each element to the nearest of the dtype of `xs`."""
    torch = sys.modules["torch"]
    with torch.no_grad():
        rows = _in_rows(xs)
        torch._foreach_copy_(rows, torch._utils._unflatten_dense_tensors(flat.to(rows[0].dtype), rows))
    for x in xs:  # the kernel for many tensors leaves that out
        torch.autograd.graph.increment_version(x)


def _in_rows(xs: Sequence[Any]) -> list[Any]:
    return [x if x.is_contiguous() else x.as_strided((x.numel(),), (1,)) for x in xs]

"""Tensors of torch, of its subclasses too."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from samestep._util.loaded import is_a
from samestep.arrays.describe import Library


def _new(dtype: str, shape: tuple[int, ...], device: int | None = None, *, on_host: bool = False) -> Any:
    import torch

    index = torch.cuda.current_device() if device is None and not on_host else device
    place = None if on_host else torch.device("cuda", index)
    return torch.empty(shape, dtype=getattr(torch, dtype), device=place)


def torch_streams() -> Callable[[int], int]:
    """What returns the current stream of a device, given its number.

    It is what torch's compiler calls, too: `torch.cuda.current_stream` makes a Stream for it, which takes 4 us.
    """
    import torch

    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


def _stream(x: Any) -> int:
    return torch_streams()(x.get_device())


def of_bytes(memory: np.ndarray[Any, Any], dtype: str) -> Any:
    """Bytes in host memory as elements of a dtype that NumPy may lack."""
    torch = sys.modules["torch"]
    return torch.from_numpy(memory).view(getattr(torch, dtype))


TORCH = Library(
    "torch",
    lambda x: is_a(x, "torch", "Tensor") and not x.is_cuda,
    mutable=True,
    new=functools.partial(_new, on_host=True),
    flat=lambda x: x.detach().view(-1),
)
ON_DEVICE = Library(
    "torch gpu",
    lambda x: is_a(x, "torch", "Tensor") and x.is_cuda,
    computes=True,
    new=_new,
    flat=lambda x: x.detach().view(-1),
    stream=_stream,
    widen=lambda x: x.detach().float(),
    store_rounded=lambda wide, out: out.detach().copy_(wide),
)


def gathers(xs: Sequence[Any], dtype: str) -> bool:
    """Whether `gather` takes arrays of `dtype`: torch copies tensors in device memory by one kernel, of most dtypes."""
    if len(xs) < 2 or dtype in ("uint16", "uint32", "uint64") or not all(map(ON_DEVICE.holds, xs)):
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

"""Tensors and operators of torch in the terms of the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import InvalidArgumentError
from samestep.reduce_ops import AVG, BAND, BOR, BXOR, MAX, MIN, PROD, SUM, premul, resolve

__all__ = ["copy_back", "flat", "joined", "memory", "reduction", "same_count", "summand"]

_Op = dist.ReduceOp.RedOpType
_OPS = {
    _Op.SUM: SUM,
    _Op.AVG: AVG,
    _Op.PRODUCT: PROD,
    _Op.MIN: MIN,
    _Op.MAX: MAX,
    _Op.BAND: BAND,
    _Op.BOR: BOR,
    _Op.BXOR: BXOR,
}
# What the core cannot name is moved as bytes.
_NAMED = (
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32),
    *(
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


def reduction(op: Any) -> tuple[int, float]:
    """The number of a `ReduceOp` in the core, and this rank's factor.

    Raises:
      InvalidArgumentError: there is no such reduction here.

    Example:
      >>> reduction(dist.ReduceOp.SUM)
      (0, 1.0)
    """
    kind = getattr(op, "op", op)
    if kind == _Op.PREMUL_SUM:
        factor = getattr(op, "factor", None)
        if factor is None:
            raise InvalidArgumentError(
                "PREMUL_SUM: this torch keeps the factor to itself; multiply the tensor and use SUM"
            )
        return resolve(premul(float(factor)))
    if kind not in _OPS:
        raise InvalidArgumentError(f"the backend 'samestep' has no reduction {kind}")
    return resolve(_OPS[kind])


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the core may move it; one of a type that the core cannot name as its bytes.

    Raises:
      InvalidArgumentError: as `summand`.
    """
    plain = summand(tensor)
    return plain if plain.dtype in _NAMED else plain.view(torch.uint8)


def summand(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the core may reduce it: dense, on the host, apart from autograd.

    Raises:
      InvalidArgumentError: the tensor is on a device, or sparse.
    """
    if tensor.device.type != "cpu":
        raise InvalidArgumentError(
            f"the backend 'samestep' carries tensors of the host, got one on {tensor.device}; move it by .cpu(), "
            "or use a backend for that device: init_process_group('cpu:gloo,cuda:nccl')"
        )
    if tensor.layout is not torch.strided:
        raise InvalidArgumentError(
            f"the backend 'samestep' reduces sparse tensors by all_reduce with SUM alone, got {tensor.layout}; "
            "pass x.to_dense()"
        )
    plain = tensor.detach()
    return plain.view(-1) if plain.is_contiguous() else plain


def same_count(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all have as many elements as the first."""
    return all(tensor.numel() == tensors[0].numel() for tensor in tensors)


def flat(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """One new tensor with room for all of these."""
    return torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One new tensor with the elements of all of these, one after the other."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def copy_back(source: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """The elements of `source`, in turn, into each of these."""
    for tensor, part in zip(tensors, source.split([t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))

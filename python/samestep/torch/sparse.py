"""Sums of sparse tensors: the entries of all ranks are concatenated and coalesced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from samestep import _core
from samestep.errors import InvalidArgumentError

__all__ = ["all_reduce"]


def all_reduce(
    comm: _core.Communicator, tensor: torch.Tensor, op: Any, timeout: float
) -> tuple[list[_core.Work], Callable[[], None]]:
    """Start the sum of a sparse tensor over all ranks. Blocks for one exchange of the numbers of entries.

    Args:
      comm: the group.
      tensor: of COO layout and the same shape on all ranks; gets the sum, coalesced.
      op: only SUM.
      timeout: seconds for the exchange of the numbers of entries.

    Returns:
      The pending operations, and the function that assembles the result afterwards.

    Raises:
      InvalidArgumentError: another operator or layout.
    """
    if op != dist.ReduceOp.SUM or tensor.layout is not torch.sparse_coo:
        raise InvalidArgumentError(
            f"all_reduce: sparse tensors can be summed, in COO layout, got {op} of {tensor.layout}; "
            "pass x.to_dense()"
        )
    mine = tensor.coalesce()
    entries, values = mine.indices().T.contiguous(), mine.values().contiguous()
    n_entries = torch.empty(comm.size, dtype=torch.int64)
    comm.allgather(torch.tensor([len(entries)]), n_entries).wait(timeout, True)
    n = int(n_entries.sum())
    all_entries = torch.empty((n, *entries.shape[1:]), dtype=entries.dtype)
    all_values = torch.empty((n, *values.shape[1:]), dtype=values.dtype)
    parts = []
    for own, gathered in ((entries, all_entries), (values, all_values)):
        row = own.shape[1:].numel()
        counts = [k * row for k in n_entries.tolist()]
        parts.append(comm.allgatherv(own.view(-1), gathered.view(-1), counts))

    def finish() -> None:
        total = torch.sparse_coo_tensor(all_entries.T, all_values, tensor.shape, check_invariants=False)
        tensor.copy_(total.coalesce())

    return parts, finish

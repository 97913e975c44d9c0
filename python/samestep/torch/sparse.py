"""Sums of sparse tensors: the entries of all ranks are concatenated and coalesced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from samestep import _core
from samestep._util.json_layout import Many
from samestep.errors import InvalidArgumentError
from samestep.group import json_exchange
from samestep.torch import tensors


def all_reduce(
    comm: _core.Communicator, listed: list[torch.Tensor], op: Any, timeout: float
) -> tuple[list[_core.Work], Callable[[], None]]:
    """Start the sum of a sparse tensor over all ranks. Waits for all ranks to exchange shapes and numbers of entries.

    Args:
      comm: the group.
      listed: one tensor of COO layout, which gets the sum, coalesced.
      op: only SUM.
      timeout: seconds for that exchange.

    Returns:
      The pending operations, and the function that assembles the result afterwards.

    Raises:
      InvalidArgumentError: another operator, layout or device, or several tensors.
      MismatchError: the ranks do not agree on shape, dtype or sparse dimensions.
    """
    if len(listed) != 1:
        raise InvalidArgumentError(
            f"all_reduce: sparse tensors are reduced one by one, got a list of {len(listed)}"
        )
    (tensor,) = listed
    if op != dist.ReduceOp.SUM or tensor.layout is not torch.sparse_coo:
        raise InvalidArgumentError(
            f"all_reduce: sparse tensors can be summed, in COO layout, got {op} of {tensor.layout}; "
            "pass x.to_dense()"
        )
    if not tensor.is_cpu:
        tensors.summand(tensor)  # says what to do
    mine = tensor.coalesce()
    entries, values = mine.indices().T.contiguous(), mine.values().contiguous()
    dtype, shape = str(mine.dtype).removeprefix("torch."), list(mine.shape)
    with _core.UserCall(f"all_reduce of sparse {dtype}{shape}"):
        facts = json_exchange.allgather(
            comm, [len(entries), dtype, shape, mine.sparse_dim()], [int, str, Many(int), int], timeout
        )
    known = [f"{dtype}{shape} with {n_sparse} sparse dimensions" for _, dtype, shape, n_sparse in facts]
    json_exchange.require_equal("all_reduce", "a sparse tensor", known)
    n_entries = [found[0] for found in facts]
    n = sum(n_entries)
    all_entries = torch.empty((n, *entries.shape[1:]), dtype=entries.dtype)
    all_values = torch.empty((n, *values.shape[1:]), dtype=values.dtype)
    parts = []
    for own, gathered in ((entries, all_entries), (values, all_values)):
        row = own.shape[1:].numel()
        counts = [k * row for k in n_entries]
        parts.append(comm.allgatherv(own.view(-1), gathered.view(-1), counts))

    def finish() -> None:
        total = torch.sparse_coo_tensor(all_entries.T, all_values, tensor.shape, check_invariants=False)
        tensor.copy_(total.coalesce())

    return parts, finish

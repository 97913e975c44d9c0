"""Checks of lists of tensors, before anything is sent: what torch's own backends check, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from samestep import _core
from samestep._util.json_layout import Many
from samestep.errors import InvalidArgumentError
from samestep.group import json_exchange


def require_one_each(verb: str, what: str, blocks: Sequence[Any], size: int) -> None:
    """Raise InvalidArgumentError unless there is one tensor for each rank."""
    if len(blocks) != size:
        raise InvalidArgumentError(
            f"{verb}: there must be one {what} tensor for each of the {size} ranks, got {len(blocks)}"
        )


def require_blocks(
    verb: str,
    what: str,
    blocks: Sequence[torch.Tensor],
    like: torch.Tensor,
    comm: _core.Communicator,
    *,
    of_any_length: bool = True,
) -> bool:
    """Whether all blocks of a list have the same number of elements; else they differ in length by rank.

    Args:
      verb, what: for errors, such as "all_gather" and "output".
      blocks: one for each rank.
      like: what goes into, or comes from, this rank's block.
      of_any_length: blocks of other ranks may differ in length.

    Raises:
      InvalidArgumentError: a block has another dtype, device or layout than `like`; or another shape, except that of
        another rank where lengths differ.
    """
    require_one_each(verb, what, blocks, comm.size)
    require_alike(verb, what, blocks, like)
    equal = len({block.numel() for block in blocks}) == 1
    for i, block in enumerate(blocks):
        if (equal or i == comm.rank or not of_any_length) and block.shape != like.shape:
            raise _differs(verb, what, i, block, like)
    return equal


def require_alike(
    verb: str, what: str, listed: Sequence[torch.Tensor], like: torch.Tensor, *, in_shape: bool = False
) -> None:
    """Raise InvalidArgumentError unless all have the dtype, device and layout of `like`, or also its shape."""
    expected = (like.dtype, like.device, like.layout)
    for i, tensor in enumerate(listed):
        known = (tensor.dtype, tensor.device, tensor.layout)
        if known != expected or (in_shape and tensor.shape != like.shape):
            raise _differs(verb, what, i, tensor, like)


def require_equal_counts(
    verb: str, blocks: Sequence[torch.Tensor], comm: _core.Communicator, timeout: float
) -> None:
    """Raise MismatchError if ranks have blocks of other lengths. Waits for all ranks."""
    counts = [block.numel() for block in blocks]
    with _core.UserCall(f"{verb} of blocks of several lengths"):
        facts = json_exchange.allgather(comm, counts, Many(int), timeout)
    json_exchange.require_equal(verb, "the lengths of the blocks", facts)


def block_counts(tensor: torch.Tensor, splits: Sequence[int], what: str, size: int) -> list[int]:
    """The elements of each rank's rows of a tensor, as `all_to_all_single` divides it.

    Raises:
      InvalidArgumentError: `splits` do not add up to the rows, or are of another number of ranks than `size`.
    """
    rows = int(tensor.shape[0]) if tensor.dim() else tensor.numel()
    if not splits:
        if rows % size:
            raise InvalidArgumentError(
                f"all_to_all_single: the {rows} rows of the {what} are not a multiple of the {size} ranks; give "
                f"{what}_split_sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise InvalidArgumentError(
            f"all_to_all_single: {what}_split_sizes {list(splits)} must be {size} numbers that add up to {rows}, the "
            f"first extent of the {what}"
        )
    return [n * (tensor.numel() // rows) if rows else 0 for n in splits]


def require_whole(verb: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Raise InvalidArgumentError unless `whole` has room for as many `part` as there are ranks."""
    if whole.dtype != part.dtype or whole.numel() != part.numel() * size:
        raise InvalidArgumentError(
            f"{verb}: {_text(whole)} is not {size} times {_text(part)}; the sizes must be, and the dtypes equal"
        )


def _differs(verb: str, what: str, i: int, tensor: torch.Tensor, like: torch.Tensor) -> InvalidArgumentError:
    return InvalidArgumentError(f"{verb}: {what} tensor {i} is {_text(tensor)}, expected {_text(like)}")


def _text(tensor: torch.Tensor) -> str:
    dtype, layout = (str(fact).removeprefix("torch.") for fact in (tensor.dtype, tensor.layout))
    unusual = "" if layout == "strided" else f" ({layout})"
    return f"{dtype}{list(tensor.shape)}{unusual}" + ("" if tensor.is_cpu else f" on {tensor.device}")

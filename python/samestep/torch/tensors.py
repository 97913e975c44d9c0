"""Conversion of tensors and operators of torch to those of the core; sums of sparse tensors; checks of lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from samestep import _core
from samestep._util.json_layout import Many
from samestep.errors import InvalidArgumentError
from samestep.group import json_exchange
from samestep.reduce_ops import AVG, BAND, BOR, BXOR, MAX, MIN, PROD, SUM, ReduceOp, premul, resolve

_Tensor, _STRIDED = torch.Tensor, torch.strided
_Op = dist.ReduceOp.RedOpType
_OPS = (
    *((_Op.SUM, SUM), (_Op.AVG, AVG), (_Op.MAX, MAX), (_Op.MIN, MIN), (_Op.PRODUCT, PROD)),
    *((_Op.BAND, BAND), (_Op.BOR, BOR), (_Op.BXOR, BXOR)),
)
"""No dict: to hash an operator of torch takes longer than to compare it with all of them."""
# dtypes that the core does not have are moved as bytes
_NAMED = {
    *(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
}


def _is_exchanged(dtype: torch.dtype) -> bool:
    """Whether this torch gives such tensors away by DLPack, by which the core reads them."""
    try:
        torch.empty(0, dtype=dtype).__dlpack__()
    except (BufferError, RuntimeError, TypeError):
        return False
    return True


_NAMED |= set(filter(_is_exchanged, (torch.float8_e4m3fn, torch.float8_e5m2)))


class NotOnHostError(InvalidArgumentError):
    """A tensor is on a device."""


def reduction(op: Any) -> tuple[int, float]:
    """The number of a `ReduceOp` in the core, and this rank's factor.

    Raises:
      InvalidArgumentError: the core has no such reduction.

    Example:
      >>> reduction(dist.ReduceOp.SUM)
      (0, 1.0)
    """
    known = operator_of(op)
    if known is not None:
        return resolve(known)
    kind = getattr(op, "op", op)
    if kind == _Op.PREMUL_SUM:
        factor = getattr(op, "factor", None)
        if factor is None:
            raise InvalidArgumentError(
                "PREMUL_SUM: this torch keeps the factor to itself; multiply the tensor and use SUM"
            )
        return resolve(premul(float(factor)))
    raise InvalidArgumentError(f"the backend 'samestep' has no reduction {kind}")


def operator_of(op: Any) -> ReduceOp | None:
    """The operator of samestep for a `ReduceOp`; None for those that need a factor."""
    for theirs, ours in _OPS:
        if op == theirs:
            return ours
    return None


def run_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A contiguous host tensor as a tensor of one dimension, detached from autograd; None for any other tensor.

    Must give the same shape as `summand`, because other ranks may use that path.
    """
    if type(tensor) is not _Tensor or not tensor.is_cpu or tensor.layout is not _STRIDED:
        return None
    if not tensor.is_contiguous():
        return None
    return tensor if tensor.dim() == 1 else tensor.detach().view(-1)


def gathered(blocks: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor | None:
    """What takes the elements of contiguous blocks like `like`: their memory, if they lie one behind the other.

    torch makes such for gathers of objects. Otherwise it is new, for `copy_back`; None if blocks are of another kind.
    """
    nbytes = like.nbytes if like.layout is _STRIDED else 0
    at = first = blocks[0].data_ptr() if nbytes and blocks and blocks[0].layout is _STRIDED else 0
    adjoin = True
    for block in blocks if first else ():
        fits = type(block) is _Tensor and block.dtype is like.dtype and block.shape == like.shape
        if not (fits and block.is_cpu and block.is_contiguous()):
            return None
        adjoin = adjoin and block.data_ptr() == at
        at += nbytes
    if not first:
        return None
    if adjoin and blocks[-1].untyped_storage().data_ptr() == blocks[0].untyped_storage().data_ptr():
        return blocks[0].detach().as_strided((len(blocks) * like.numel(),), (1,))
    # What is in progress on a block would not be noticed: the copies are not made by the core.
    return None if _core.memory_is_in_use() else like.new_empty(len(blocks) * like.numel())


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """`summand`, for what is only moved: as bytes if the core does not have its dtype."""
    plain = summand(tensor)
    return plain if plain.dtype in _NAMED else plain.view(torch.uint8)


def summand(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the core may reduce it: dense, on the host, detached from autograd; or an InvalidArgumentError."""
    run = run_of(tensor)
    if run is not None:
        return run
    if not tensor.is_cpu:
        raise NotOnHostError(
            f"the backend 'samestep' handles tensors of the host, and by torch's NCCL those of CUDA devices, got one "
            f"on {tensor.device}; move it by .cpu(), or name a backend for that device, too, as in "
            "init_process_group('cpu:samestep,cuda:nccl')"
        )
    if tensor.layout is not torch.strided:
        raise InvalidArgumentError(
            f"the backend 'samestep' reduces sparse tensors by all_reduce with SUM alone, got {tensor.layout}; "
            "pass x.to_dense()"
        )
    plain = tensor.detach()
    return plain.view(-1) if plain.is_contiguous() else plain


def in_one_dimension(tensor: torch.Tensor) -> torch.Tensor:
    """`summand`, in one dimension, a copy where strides do not allow a view: ranks agree on counts, not on strides."""
    plain = summand(tensor)
    return plain if plain.dim() == 1 else plain.reshape(-1)


def sent(tensor: torch.Tensor) -> torch.Tensor:
    """`memory` of a tensor that is only read, in one dimension."""
    return memory(in_one_dimension(tensor))


def written_unless(
    only_read: bool, tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Callable[[], None] | None]:
    """`in_place`, or the tensors in one dimension if this rank has only to read them."""
    return ([in_one_dimension(tensor) for tensor in tensors], None) if only_read else in_place(tensors)


def in_place(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None] | None]:
    """Each tensor in one dimension, to be written, and the function that copies the elements back from copies.

    Tensors that share memory are copied, as operations that are in progress together write them.
    """
    runs = [in_one_dimension(tensor) for tensor in tensors]
    if len(runs) > 1 and _core.find_conflict([(run.data_ptr(), run.nbytes, True) for run in runs]):
        runs = [run.clone() for run in runs]
    copies = [(run, x) for run, x in zip(runs, tensors, strict=True) if run.data_ptr() != x.data_ptr()]
    for run, tensor in copies:
        _core.unpack(run, [summand(tensor)])  # one that cannot be written is rejected before anything is sent

    def finish() -> None:
        for run, tensor in copies:
            copy_back(run, [tensor])

    return runs, finish if copies else None


def require_writable(listed: Sequence[torch.Tensor]) -> None:
    """Raise InvalidArgumentError unless each of these tensors, which get results, has memory of its own per element."""
    for tensor in listed:
        if tensor.is_contiguous():
            _core.memory_span(memory(tensor))
        else:
            _core.unpack(in_one_dimension(tensor).contiguous(), [summand(tensor)])


def flat(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor with room for all of these."""
    return torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new tensor with the concatenated elements of all of these."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def copy_back(source: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Split `source` into these tensors."""
    if all(tensor.is_contiguous() and tensor.dtype == source.dtype for tensor in tensors):
        _core.unpack(memory(source), list(map(memory, tensors)))  # a fifth of the time for small ones
        return
    for tensor, part in zip(tensors, source.split([t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def sparse_all_reduce(
    comm: _core.Communicator, listed: list[torch.Tensor], op: Any, timeout: float
) -> tuple[list[_core.Work], Callable[[], None]]:
    """Start the sum of a sparse tensor over all ranks. Waits for all ranks to exchange shapes and numbers of entries.

    Returns the pending operations, and the function that stores the sum afterwards, coalesced.
    """
    if len(listed) != 1:
        raise InvalidArgumentError(
            f"sparse_all_reduce: sparse tensors are reduced one by one, got a list of {len(listed)}"
        )
    (tensor,) = listed
    if op != dist.ReduceOp.SUM or tensor.layout is not torch.sparse_coo:
        raise InvalidArgumentError(
            f"sparse_all_reduce: sparse tensors can be summed, in COO layout, got {op} of {tensor.layout}; "
            "pass x.to_dense()"
        )
    if not tensor.is_cpu:
        summand(tensor)  # says what to do
    mine = tensor.coalesce()
    entries, values = mine.indices().T.contiguous(), mine.values().contiguous()
    dtype, shape = str(mine.dtype).removeprefix("torch."), list(mine.shape)
    with _core.UserCall(f"sparse_all_reduce of sparse {dtype}{shape}"):
        facts = json_exchange.allgather(
            comm, [len(entries), dtype, shape, mine.sparse_dim()], [int, str, Many(int), int], timeout
        )
    known = [f"{dtype}{shape} with {n_sparse} sparse dimensions" for _, dtype, shape, n_sparse in facts]
    json_exchange.require_equal("sparse_all_reduce", "a sparse tensor", known)
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
      blocks: one for each rank, all of the dtype, device and layout of `like`, or an InvalidArgumentError.
      like: what goes into, or comes from, this rank's block, and has its shape.
      of_any_length: blocks of other ranks may differ in length.
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
    """The elements of each rank's rows of a tensor, as `all_to_all_single` divides it."""
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

"""Collectives with several arrays on each rank, under torch's names: one for each device, or host arrays.

They are the `..._multi` verbs of `samestep.Backend`. All ranks give lists of the same length, else all raise
MismatchError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from samestep.distributed import buffers, groups
from samestep.distributed.backends import ReduceOp
from samestep.distributed.groups import WORLD
from samestep.distributed.requests import started
from samestep.errors import InvalidArgumentError
from samestep.multidevice import collectives
from samestep.multidevice.host_path import ArrayList
from samestep.reduce_ops import Op

__all__ = ["all_gather_multigpu", "all_reduce_multigpu", "broadcast_multigpu", "reduce_multigpu"]


def broadcast_multigpu(
    tensor_list: Sequence[Any],
    src: int | None = None,
    group: Any = WORLD,
    async_op: bool = False,
    src_tensor: int = 0,
    *,
    group_src: int | None = None,
) -> Any:
    """Give all arrays of all ranks the elements of `tensor_list[src_tensor]` of rank `src`."""
    verb = "broadcast_multigpu"
    of = groups.resolve(group)
    if of is None:
        return None
    listed = _checked(tensor_list, verb)
    root = groups.rank_in(of, verb, "src", src, group_src)
    index = groups.whole_number(src_tensor, verb, "src_tensor")
    collectives.require_index(index, listed, "src_tensor")
    with collectives.called(listed):
        pending = collectives.bcast(of, listed, root, index)
    return started(of, pending.work, _replacing(tensor_list, pending), async_op, pending.deadline)


def all_reduce_multigpu(
    tensor_list: Sequence[Any], op: Op = ReduceOp.SUM, group: Any = WORLD, async_op: bool = False
) -> Any:
    """Reduce over all arrays of all ranks; all of them get the result.

    Example:
      >>> import numpy as np, samestep.distributed as dist
      >>> dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
      >>> tensors = [np.ones(1) for _ in range(8)]
      >>> dist.all_reduce_multigpu(tensors)
      >>> float(sum(tensors)[0])
      64.0
      >>> dist.destroy_process_group()
    """
    of = groups.resolve(group)
    if of is None:
        return None
    listed = _checked(tensor_list, "all_reduce_multigpu")
    with collectives.called(listed):
        pending = collectives.allreduce(of, listed, op)
    return started(of, pending.work, _replacing(tensor_list, pending), async_op, pending.deadline)


def reduce_multigpu(  # noqa: PLR0917 - positions that scripts rely on
    tensor_list: Sequence[Any],
    dst: int | None = None,
    op: Op = ReduceOp.SUM,
    group: Any = WORLD,
    async_op: bool = False,
    dst_tensor: int = 0,
    *,
    group_dst: int | None = None,
) -> Any:
    """Reduce over all arrays of all ranks; `tensor_list[dst_tensor]` of rank `dst` gets the result."""
    verb = "reduce_multigpu"
    of = groups.resolve(group)
    if of is None:
        return None
    listed = _checked(tensor_list, verb)
    root = groups.rank_in(of, verb, "dst", dst, group_dst)
    index = groups.whole_number(dst_tensor, verb, "dst_tensor")
    collectives.require_index(index, listed, "dst_tensor")
    with collectives.called(listed):
        pending = collectives.reduce(of, listed, op, root, index)
    return started(of, pending.work, _replacing(tensor_list, pending), async_op, pending.deadline)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Any = WORLD,
    async_op: bool = False,
) -> Any:
    """Gather all arrays of all ranks into every list.

    Args:
      output_tensor_lists: as many lists as there are inputs, each on its input's device; input j of rank k arrives
        in each at `k * len(input_tensor_list) + j`.
      input_tensor_list: this rank's arrays.
      group: `group.WORLD` or what `new_group` returned.
      async_op: return a `Request` at once.
    """
    verb = "all_gather_multigpu"
    of = groups.resolve(group)
    if of is None:
        return None
    listed = collectives.checked(input_tensor_list, verb, "input_tensor_list")
    n = len(listed.arrays)
    if not isinstance(output_tensor_lists, (list, tuple)):
        kind = type(output_tensor_lists).__name__
        raise TypeError(f"{verb}: output_tensor_lists must be a list of lists, got {kind}")
    if len(output_tensor_lists) != n:
        raise InvalidArgumentError(
            f"{verb}: output_tensor_lists must have {n} lists, as there are inputs, got {len(output_tensor_lists)}"
        )
    receives = []
    for i, tensors in enumerate(output_tensor_lists):
        name = f"output_tensor_lists[{i}]"
        infos = buffers.listed(tensors, of.size * n, listed.infos[0], verb, name, written=True)
        receives.append(collectives.targets(tensors, infos))
    with collectives.called(listed):
        pending = collectives.allgather(of, listed, receives)

    def finish() -> None:
        pending.finish()
        for tensors, received in zip(output_tensor_lists, receives, strict=True):
            _replace(tensors, collectives.results(tensors, received))

    return started(of, pending.work, finish, async_op, pending.deadline)


def _checked(tensors: Any, verb: str) -> ArrayList:
    """Check a list whose arrays are written, or replaced if they cannot be."""
    listed = collectives.checked(tensors, verb, "tensor_list")
    buffers.listed(tensors, len(tensors), listed.infos[0], verb, "tensor_list", written=True)
    return listed


def _replacing(tensors: Any, pending: collectives.PendingResult) -> Callable[[], None]:
    return lambda: _replace(tensors, pending.finish())


def _replace(tensors: Any, results: Sequence[Any]) -> None:
    """Replace the arrays that cannot be written by new ones."""
    for i, result in enumerate(results):
        if result is not tensors[i]:
            tensors[i] = result

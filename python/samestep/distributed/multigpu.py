"""Collectives with several arrays on each rank: one for each device, or host arrays.

All ranks give lists of the same length, else all raise MismatchError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samestep.distributed import buffers, groups, lists
from samestep.distributed.backends import ReduceOp
from samestep.distributed.combination import ArrayList
from samestep.distributed.groups import WORLD
from samestep.errors import InvalidArgumentError
from samestep.reduce_ops import Op


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
    listed = lists.checked(tensor_list, verb, "tensor_list", written=True)
    root = groups.rank_in(of, verb, "src", src, group_src)
    index = groups.whole_number(src_tensor, verb, "src_tensor")
    lists.require_index(index, listed, "src_tensor")
    with lists.called(listed):
        return lists.bcast(of, listed, root, index, async_op=async_op)


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
    if not async_op and lists.reduced_at_once(of, tensor_list, op, "all_reduce_multigpu"):
        return None
    listed = lists.checked(tensor_list, "all_reduce_multigpu", "tensor_list", written=True)
    with lists.called(listed):
        return lists.reduce(of, listed, op, async_op=async_op)


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
    listed = lists.checked(tensor_list, verb, "tensor_list", written=True)
    root = groups.rank_in(of, verb, "dst", dst, group_dst)
    index = groups.whole_number(dst_tensor, verb, "dst_tensor")
    lists.require_index(index, listed, "dst_tensor")
    with lists.called(listed):
        return lists.reduce(of, listed, op, root, index, async_op=async_op)


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
    listed = lists.checked(input_tensor_list, verb, "input_tensor_list", written=False)
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
        receives.append(ArrayList(verb, tensors, infos))
    with lists.called(listed):
        return lists.allgather(of, listed, receives, async_op=async_op)

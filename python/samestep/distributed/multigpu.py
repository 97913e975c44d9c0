"""Collectives with several arrays on each rank, under torch's names: one for each device, or host arrays.

They are the `..._multi` verbs of `samestep.Backend`. All ranks give lists of the same length, else all raise
MismatchError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from samestep import lists
from samestep.distributed import buffers, groups
from samestep.distributed.groups import WORLD
from samestep.distributed.names import ReduceOp
from samestep.distributed.requests import started
from samestep.errors import InvalidArgumentError
from samestep.lists_on_host import Listed

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
    """Give all arrays of all ranks the elements of `tensor_list[src_tensor]` of rank `src`.

    With `async_op=True` too, in a group with NCCL a list that goes through the host, and the first use of a list of
    devices, meets the other ranks inside the call: it has no place between a send and its recv.
    """
    verb = "broadcast_multigpu"
    of = groups.resolve(group)
    if of is None:
        return None
    listed = _checked(tensor_list, verb)
    root = groups.rank_in(of, verb, "src", src, group_src)
    place = groups.whole_number(src_tensor, verb, "src_tensor")
    lists.require_index(place, listed, "src_tensor")
    begun = lists.bcast(of, listed, root, place)
    return started(of, begun.works, _replacing(tensor_list, begun), async_op, begun.deadline)


def all_reduce_multigpu(
    tensor_list: Sequence[Any], op: Any = ReduceOp.SUM, group: Any = WORLD, async_op: bool = False
) -> Any:
    """Reduce over all arrays of all ranks; all of them get the result.

    With `async_op=True` too, in a group with NCCL a list that goes through the host, and the first use of a list of
    devices, meets the other ranks inside the call: it has no place between a send and its recv.

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
    begun = lists.allreduce(of, _checked(tensor_list, "all_reduce_multigpu"), op)
    return started(of, begun.works, _replacing(tensor_list, begun), async_op, begun.deadline)


def reduce_multigpu(  # noqa: PLR0917 - positions that scripts rely on
    tensor_list: Sequence[Any],
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Any = WORLD,
    async_op: bool = False,
    dst_tensor: int = 0,
    *,
    group_dst: int | None = None,
) -> Any:
    """Reduce over all arrays of all ranks; `tensor_list[dst_tensor]` of rank `dst` gets the result.

    With `async_op=True` too, in a group with NCCL a list that goes through the host, and the first use of a list of
    devices, meets the other ranks inside the call: it has no place between a send and its recv.
    """
    verb = "reduce_multigpu"
    of = groups.resolve(group)
    if of is None:
        return None
    listed = _checked(tensor_list, verb)
    root = groups.rank_in(of, verb, "dst", dst, group_dst)
    place = groups.whole_number(dst_tensor, verb, "dst_tensor")
    lists.require_index(place, listed, "dst_tensor")
    begun = lists.reduce(of, listed, op, root, place)
    return started(of, begun.works, _replacing(tensor_list, begun), async_op, begun.deadline)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Any = WORLD,
    async_op: bool = False,
) -> Any:
    """Every array of every rank goes to every list.

    With `async_op=True` too, in a group with NCCL a list that goes through the host, and the first use of a list of
    devices, meets the other ranks inside the call: it has no place between a send and its recv.

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
    listed = lists.checked(input_tensor_list, verb, "input_tensor_list")
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
        receives.append(lists.targets(tensors, infos))
    begun = lists.allgather(of, listed, receives)

    def finish() -> None:
        begun.finish()
        for tensors, received in zip(output_tensor_lists, receives, strict=True):
            _replace(tensors, lists.results(tensors, received))

    return started(of, begun.works, finish, async_op, begun.deadline)


def _checked(tensors: Any, verb: str) -> Listed:
    """A list whose arrays are to be written, or replaced where they cannot be."""
    listed = lists.checked(tensors, verb, "tensor_list")
    buffers.listed(tensors, len(tensors), listed.infos[0], verb, "tensor_list", written=True)
    return listed


def _replacing(tensors: Any, begun: lists.Begun) -> Callable[[], None]:
    return lambda: _replace(tensors, begun.finish())


def _replace(tensors: Any, results: Sequence[Any]) -> None:
    """Puts new arrays in the places of those that could not be written."""
    for i, result in enumerate(results):
        if result is not tensors[i]:
            tensors[i] = result

"""Collectives with several arrays on each rank, under torch's names: one for each device, or host arrays.

Arrays of a rank are combined in its own memory first, in the order of the list. All ranks give lists of the same
length, else all raise MismatchError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from samestep import _core, arrays
from samestep.agreement import by_rank
from samestep.backend import Backend
from samestep.distributed import buffers, groups
from samestep.distributed.groups import WORLD
from samestep.distributed.names import ReduceOp
from samestep.distributed.requests import started
from samestep.errors import InvalidArgumentError, MismatchError
from samestep.reduce_ops import AVG, LAND, LOR, MAX, MIN, PROD, SUM, resolve

__all__ = ["all_gather_multigpu", "all_reduce_multigpu", "broadcast_multigpu", "reduce_multigpu"]

_Run = np.ndarray[Any, Any]

_HALVES = ("float16", "bfloat16")
_UFUNCS: dict[int, np.ufunc] = {
    PROD.value: np.multiply,
    MIN.value: np.minimum,
    MAX.value: np.maximum,
    ReduceOp.BAND.value: np.bitwise_and,
    ReduceOp.BOR.value: np.bitwise_or,
    ReduceOp.BXOR.value: np.bitwise_xor,
    LAND.value: np.logical_and,
    LOR.value: np.logical_or,
}


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
    infos = _checked(tensor_list, verb, "tensor_list", written=True)
    root = groups.rank_in(of, verb, "src", src, group_src)
    place = _index(src_tensor, len(infos), verb, "src_tensor")
    if of.rank == root:
        run = buffers.joined([tensor_list[place]], infos[place])
    else:
        run = buffers.new_run(tensor_list[0], infos[0], 1)
    lengths, check = _lengths(of, len(infos), verb)

    def finish() -> None:
        check()
        buffers.fill(run, tensor_list, infos)

    return started(of, [lengths, of._comm.broadcast(run, root)], finish, async_op)


def all_reduce_multigpu(
    tensor_list: Sequence[Any], op: Any = ReduceOp.SUM, group: Any = WORLD, async_op: bool = False
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
    verb = "all_reduce_multigpu"
    of = groups.resolve(group)
    if of is None:
        return None
    infos = _checked(tensor_list, verb, "tensor_list", written=True)
    run, code, factor, finished = _combined(tensor_list, infos, op, of.size)
    lengths, check = _lengths(of, len(infos), verb)

    def finish() -> None:
        check()
        buffers.fill(finished(run), tensor_list, infos)

    return started(of, [lengths, of._comm.all_reduce(run, None, code, factor)], finish, async_op)


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
    """Reduce over all arrays of all ranks; `tensor_list[dst_tensor]` of rank `dst` gets the result."""
    verb = "reduce_multigpu"
    of = groups.resolve(group)
    if of is None:
        return None
    infos = _checked(tensor_list, verb, "tensor_list", written=True)
    root = groups.rank_in(of, verb, "dst", dst, group_dst)
    place = _index(dst_tensor, len(infos), verb, "dst_tensor")
    run, code, factor, finished = _combined(tensor_list, infos, op, of.size)
    lengths, check = _lengths(of, len(infos), verb)

    def finish() -> None:
        check()
        if of.rank == root:
            buffers.fill(finished(run), tensor_list, infos, only=place)

    return started(of, [lengths, of._comm.reduce(run, None, code, factor, root)], finish, async_op)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Any = WORLD,
    async_op: bool = False,
) -> Any:
    """Every array of every rank goes to every list.

    Args:
      output_tensor_lists: as many lists as there are inputs; input j of rank k arrives in each at
        `k * len(input_tensor_list) + j`.
      input_tensor_list: this rank's arrays.
      group: `group.WORLD` or what `new_group` returned.
      async_op: return a `Request` at once.
    """
    verb = "all_gather_multigpu"
    of = groups.resolve(group)
    if of is None:
        return None
    known = _checked(input_tensor_list, verb, "input_tensor_list", written=False)
    n = len(known)
    if not isinstance(output_tensor_lists, (list, tuple)):
        kind = type(output_tensor_lists).__name__
        raise TypeError(f"{verb}: output_tensor_lists must be a list of lists, got {kind}")
    if len(output_tensor_lists) != n:
        raise InvalidArgumentError(
            f"{verb}: output_tensor_lists must have {n} lists, as there are inputs, got {len(output_tensor_lists)}"
        )
    infos = [
        buffers.listed(tensors, of.size * n, known[0], verb, f"output_tensor_lists[{i}]", written=True)
        for i, tensors in enumerate(output_tensor_lists)
    ]
    run = buffers.new_run(input_tensor_list[0], known[0], of.size * n)
    lengths, check = _lengths(of, n, verb)
    work = of._comm.all_gather(buffers.joined(input_tensor_list, known[0]), run)

    def finish() -> None:
        check()
        for tensors, described in zip(output_tensor_lists, infos, strict=True):
            buffers.spread(run, tensors, described)

    return started(of, [lengths, work], finish, async_op)


def _checked(tensors: Any, verb: str, name: str, *, written: bool) -> list[arrays.ArrayInfo]:
    """What the arrays of a list are, which must be alike."""
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{verb}: {name} must be a list or tuple of arrays, got {type(tensors).__name__}")
    if not tensors:
        raise InvalidArgumentError(f"{verb}: {name} must have at least one array")
    first = buffers.described(tensors[0], verb, f"{name}[0]")
    return buffers.listed(tensors, len(tensors), first, verb, name, written=written)


def _index(value: Any, n: int, verb: str, name: str) -> int:
    index = groups.whole_number(value, verb, name)
    if not 0 <= index < n:
        raise InvalidArgumentError(f"{verb}: {name} {index} is outside the list of {n} arrays")
    return index


def _lengths(of: Backend, mine: int, verb: str) -> tuple[_core.Work, Callable[[], None]]:
    """An exchange of the lengths of the ranks' lists, and what raises afterwards where they differ."""
    all_of_them = np.empty(of.size, np.int64)
    work = of._comm.all_gather(np.array([mine], np.int64), all_of_them)

    def check() -> None:
        if (all_of_them != all_of_them[0]).any():
            told = by_rank([f"{n} arrays" for n in all_of_them])
            raise MismatchError(
                f"{verb} in group {of.name}: the lists have {told}; all must be of one length"
            )

    return work, check


@functools.cache
def _alone() -> _core.Communicator:
    return _core.make_self_communicator("check")


def _combined(
    tensors: Sequence[Any], infos: Sequence[arrays.ArrayInfo], op: Any, n_ranks: int
) -> tuple[_Run, int, float, Callable[[_Run], _Run]]:
    """This rank's arrays reduced to one run.

    Returns:
      The run, in a type wide enough for the sum over all ranks; operator and factor to reduce it with over the
      ranks; and what makes the result of it after that.
    """
    code, factor = resolve(op)
    known = infos[0]
    stacked: _Run = arrays.new_of("numpy", known.dtype, (len(tensors), buffers.count(known)))
    # An operator that the dtype does not have is refused in the same words as by all_reduce.
    _alone().all_reduce(np.empty(0, stacked.dtype), None, code, factor)
    _core.pack(list(tensors), stacked)
    wide = stacked.dtype
    if known.dtype in _HALVES and code not in (MIN.value, MAX.value):
        wide = np.dtype(np.float32)
    elif code == AVG.value and wide.kind in "iu":
        wide = np.dtype(np.uint64 if wide.kind == "u" else np.int64)
    combine = _UFUNCS.get(code, np.add)
    with np.errstate(all="ignore"):
        run = functools.reduce(combine, stacked.astype(wide)).astype(wide)
    n = n_ranks * len(tensors)

    def finished(total: _Run) -> _Run:
        with np.errstate(all="ignore"):
            if code == AVG.value:
                total = total // wide.type(n) if wide.kind in "iu" else total * wide.type(1 / n)
            return np.ascontiguousarray(total.astype(stacked.dtype))

    return np.ascontiguousarray(run), SUM.value if code == AVG.value else code, factor, finished

"""Collectives and messages under torch's names, on arrays of any library.

Rules for all collectives. A rank that is not in `group` gets None immediately. `async_op=True` gives a `Request`.
Results are written into the given arrays, and None is returned. If an array cannot be written (JAX, read-only NumPy), a
new array is returned; in a list the entry is replaced. Ranks that disagree in function, element count, dtype, op or
root all raise MismatchError, and the group stays usable.

A message matches only receives with its tag in the same group. Messages of one sender with one tag stay in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samestep import internal
from samestep.backend import Backend
from samestep.distributed import buffers, groups
from samestep.distributed.groups import WORLD, ReduceOp
from samestep.distributed.requests import Request, started
from samestep.errors import InvalidArgumentError
from samestep.group.objects import ANY, wait_or_cancel
from samestep.reduce_ops import Op, resolve

__all__ = [
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "scatter",
    "send",
]


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Any = WORLD,
    async_op: bool = False,
    *,
    group_src: int | None = None,
) -> Any:
    """Give every rank of the group the elements of rank `src`.

    Args:
      tensor: array; ranks must agree on its element count, not on its shape.
      src: global rank that sends.
      group: `group.WORLD` or what `new_group` returned.
      async_op: return a `Request` without waiting.
      group_src: instead of `src`, the rank within the group.

    Example:
      >>> import numpy as np, samestep.distributed as dist
      >>> dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
      >>> x = np.arange(3)
      >>> dist.broadcast(x, src=0)
      >>> dist.destroy_process_group()
    """
    if (of := groups.resolve(group)) is None:
        return None
    root = groups.rank_in(of, "broadcast", "src", src, group_src)
    if not async_op and (plain := buffers.contiguous_or_none(tensor)) is not None:
        of.bcast(plain, root=root)
        return None
    known = buffers.described(tensor, "broadcast")
    if of.rank == root:
        run = buffers.read(tensor, known)
        finish = None if known.writable else lambda: tensor
    else:
        run, finish, _ = buffers.in_place(tensor, known, filled=False)
    return started(of, internal.communicator(of).bcast(run, root), finish, async_op, writes=[tensor])


def all_reduce(tensor: Any, op: Op = ReduceOp.SUM, group: Any = WORLD, async_op: bool = False) -> Any:
    """Reduce over all ranks of the group; every rank gets the result, the same bits everywhere.

    Args:
      tensor: array; ranks must agree on its element count, not on its shape.
      op: a `ReduceOp`, or any value that `samestep.ReduceOp` accepts.
      group: `group.WORLD` or what `new_group` returned.
      async_op: return a `Request` without waiting.

    Example:
      >>> import numpy as np, samestep.distributed as dist
      >>> dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
      >>> gradients = np.ones(3)
      >>> dist.all_reduce(gradients)
      >>> gradients / dist.get_world_size()
      array([1., 1., 1.])
      >>> dist.destroy_process_group()
    """
    if (of := groups.resolve(group)) is None:
        return None
    if not async_op and (plain := buffers.contiguous_or_none(tensor)) is not None:
        of.allreduce(plain, op)
        return None
    known = buffers.described(tensor, "all_reduce")
    code, factor = resolve(op, "all_reduce")
    run, finish, source = buffers.in_place(tensor, known)
    return started(
        of, internal.start_reduction(of, source, run, code, factor), finish, async_op, writes=[tensor]
    )


def reduce(
    tensor: Any,
    dst: int | None = None,
    op: Op = ReduceOp.SUM,
    group: Any = WORLD,
    async_op: bool = False,
    *,
    group_dst: int | None = None,
) -> Any:
    """Reduce over all ranks of the group; rank `dst` gets the result. All other arrays keep their elements.

    Args:
      tensor: array; ranks must agree on its element count, not on its shape.
      dst: global rank that gets the result.
      op: a `ReduceOp`, or any value that `samestep.ReduceOp` accepts.
      group: `group.WORLD` or what `new_group` returned.
      async_op: return a `Request` without waiting.
      group_dst: instead of `dst`, the rank within the group.
    """
    if (of := groups.resolve(group)) is None:
        return None
    known = buffers.described(tensor, "reduce")
    root = groups.rank_in(of, "reduce", "dst", dst, group_dst)
    code, factor = resolve(op, "reduce")
    if of.rank == root:
        run, finish, source = buffers.in_place(tensor, known)
    else:
        run, source = None, buffers.read(tensor, known)
        finish = None if known.writable else lambda: tensor
    return started(
        of, internal.start_reduction(of, source, run, code, factor, root), finish, async_op, writes=[tensor]
    )


def all_gather(tensor_list: Sequence[Any], tensor: Any, group: Any = WORLD, async_op: bool = False) -> Any:
    """Every rank of the group gets all ranks' arrays: `tensor_list[i]` is the array of group rank i.

    Args:
      tensor_list: one array for each rank of the group, with the dtype and count of `tensor`.
      tensor: this rank's array.
      group: `group.WORLD` or what `new_group` returned.
      async_op: return a `Request` without waiting.

    Raises:
      InvalidArgumentError: names the list, and the entry that is wrong.
    """
    if (of := groups.resolve(group)) is None:
        return None
    known = buffers.described(tensor, "all_gather")
    infos = buffers.listed(tensor_list, of.size, known, "all_gather", "tensor_list", written=True)
    run = buffers.new_run(tensor, known, of.size)
    work = internal.communicator(of).allgather(buffers.read(tensor, known, beside_lists=True), run)
    return started(of, work, lambda: buffers.spread(run, tensor_list, infos), async_op, writes=tensor_list)


def gather(
    tensor: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int | None = None,
    group: Any = WORLD,
    async_op: bool = False,
    *,
    group_dst: int | None = None,
) -> Any:
    """Rank `dst` gets all ranks' arrays: `gather_list[i]` is the array of group rank i.

    Args:
      tensor: this rank's array.
      gather_list: at `dst` one array for each rank of the group; None or [] on other ranks.
      dst: global rank that receives; 0 if neither it nor `group_dst` is given.
      group: `group.WORLD` or what `new_group` returned.
      async_op: return a `Request` without waiting.
      group_dst: instead of `dst`, the rank within the group.

    Raises:
      InvalidArgumentError: a list on another rank, none at `dst`, or a wrong one.
    """
    if (of := groups.resolve(group)) is None:
        return None
    known = buffers.described(tensor, "gather")
    root = _root(of, "gather", "dst", dst, group_dst)
    _check_whose_list(of, root, gather_list, "gather", "gather_list")
    sent = buffers.read(tensor, known, beside_lists=True)
    if of.rank != root:
        return started(of, internal.communicator(of).gather(sent, None, root), None, async_op)
    assert gather_list is not None
    infos = buffers.listed(gather_list, of.size, known, "gather", "gather_list", written=True)
    run = buffers.new_run(tensor, known, of.size)
    finish = lambda: buffers.spread(run, gather_list, infos)  # noqa: E731
    return started(
        of, internal.communicator(of).gather(sent, run, root), finish, async_op, writes=gather_list
    )


def scatter(
    tensor: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Any = WORLD,
    async_op: bool = False,
    *,
    group_src: int | None = None,
) -> Any:
    """Group rank i gets `scatter_list[i]` of rank `src`.

    Args:
      tensor: array to receive into.
      scatter_list: at `src` one array for each rank of the group; None or [] on other ranks.
      src: global rank that sends; 0 if neither it nor `group_src` is given.
      group: `group.WORLD` or what `new_group` returned.
      async_op: return a `Request` without waiting.
      group_src: instead of `src`, the rank within the group.

    Raises:
      InvalidArgumentError: a list on another rank, none at `src`, or a wrong one.
    """
    if (of := groups.resolve(group)) is None:
        return None
    known = buffers.described(tensor, "scatter")
    root = _root(of, "scatter", "src", src, group_src)
    _check_whose_list(of, root, scatter_list, "scatter", "scatter_list")
    sent = None
    if of.rank == root:
        buffers.listed(scatter_list, of.size, known, "scatter", "scatter_list", written=False)
        sent = buffers.joined(scatter_list, known)
    run, finish, _ = buffers.in_place(tensor, known, filled=False, beside_lists=True)
    return started(of, internal.communicator(of).scatter(sent, run, root), finish, async_op, writes=[tensor])


def barrier(group: Any = WORLD, async_op: bool = False) -> Any:
    """Return once every rank of the group has called it."""
    of = groups.resolve(group)
    return None if of is None else started(of, internal.communicator(of).barrier(), None, async_op)


def _root(of: Any, verb: str, name: str, rank: Any, group_rank: Any) -> int:
    return groups.rank_in(of, verb, name, 0 if rank is None and group_rank is None else rank, group_rank)


def _check_whose_list(of: Any, root: int, tensors: Any, verb: str, name: str) -> None:
    """Raises InvalidArgumentError if a rank other than root has a list, or root has none."""
    absent = tensors is None or (isinstance(tensors, (list, tuple)) and not tensors)
    role = f"rank {groups.members(of)[root]}"
    if of.rank == root and absent:
        raise InvalidArgumentError(f"{verb}: {name} is missing on {role}, which needs {of.size} arrays")
    if of.rank != root and not absent:
        raise InvalidArgumentError(f"{verb}: {name} is for {role} only; give None or [] elsewhere")


_MAX_TAG = 2**31 - 1
_NON_MEMBER = -1


def send(
    tensor: Any, dst: int | None = None, group: Any = WORLD, tag: int = 0, *, group_dst: int | None = None
) -> None:
    """Send an array to a rank; return once the array may be reused.

    Args:
      tensor: array of any layout.
      dst: global rank.
      group: `group.WORLD` or what `new_group` returned.
      tag: 0 <= tag < 2**31.
      group_dst: instead of `dst`, the rank within the group.

    Raises:
      InvalidArgumentError: a wrong tag, a rank that is not in the group, or this rank itself.
    """
    of = groups.resolve(group)
    if of is not None:
        _send(of, "send", tensor, dst, tag, group_dst, async_op=False)


def isend(
    tensor: Any, dst: int | None = None, group: Any = WORLD, tag: int = 0, *, group_dst: int | None = None
) -> Request | None:
    """`send` without waiting; the array must not change until the `Request` is completed."""
    if (of := groups.resolve(group)) is None:
        return None
    request: Request = _send(of, "isend", tensor, dst, tag, group_dst, async_op=True)
    return request


def recv(
    tensor: Any, src: int | None = None, group: Any = WORLD, tag: int = 0, *, group_src: int | None = None
) -> int:
    """Receive a message.

    Args:
      tensor: array with the dtype and element count of the message; has to be writable.
      src: global rank; None: any rank of the group.
      group: `group.WORLD` or what `new_group` returned.
      tag: of the message.
      group_src: instead of `src`, the rank within the group.

    Returns:
      The sender's global rank; -1 if this rank is not in the group.

    Raises:
      MismatchError: the message has another dtype or count; it is consumed.
      InvalidArgumentError: a wrong tag, a rank that is not in the group, this rank itself, or an array that
        cannot be written.
    """
    if (of := groups.resolve(group)) is None:
        return _NON_MEMBER
    sender: int = wait_or_cancel(_start_recv(of, "recv", tensor, src, tag, group_src))
    return sender


def irecv(
    tensor: Any, src: int | None = None, group: Any = WORLD, tag: int = 0, *, group_src: int | None = None
) -> Request | None:
    """`recv` without waiting; `wait()` of the `Request` returns the sender's global rank."""
    of = groups.resolve(group)
    return None if of is None else _start_recv(of, "irecv", tensor, src, tag, group_src)


def _send(  # noqa: PLR0917
    of: Backend, verb: str, tensor: Any, dst: Any, tag: Any, group_dst: Any, *, async_op: bool
) -> Any:
    buffers.described(tensor, verb)
    peer = _peer(of, verb, "dst", dst, group_dst)
    return started(of, internal.communicator(of).send(tensor, peer, _checked(tag, verb)), None, async_op)


def _start_recv(of: Backend, verb: str, tensor: Any, src: Any, tag: Any, group_src: Any) -> Request:  # noqa: PLR0917
    if not buffers.described(tensor, verb).writable:
        raise InvalidArgumentError(
            f"{verb}: tensor, of {type(tensor).__module__}.{type(tensor).__name__}, cannot be written; "
            "receive into one that can, such as numpy.empty"
        )
    anyone = src is None and group_src is None
    peer = ANY if anyone else _peer(of, verb, "src", src, group_src)
    everyone = groups.members(of)
    inner = internal.communicator(of).recv(tensor, peer, _checked(tag, verb))
    request: Request = started(of, inner, lambda: everyone[inner.status().source], async_op=True)
    return request


def _peer(of: Backend, verb: str, name: str, rank: Any, group_rank: Any) -> int:
    peer = groups.rank_in(of, verb, name, rank, group_rank)
    if peer == of.rank:
        raise InvalidArgumentError(f"{verb}: {name} is this rank itself, {groups.members(of)[peer]}")
    return peer


def _checked(tag: Any, verb: str) -> int:
    number = groups.whole_number(tag, verb, "tag")
    if not 0 <= number <= _MAX_TAG:
        raise InvalidArgumentError(f"{verb}: tag must be at least 0 and below 2**31, got {number}")
    return number

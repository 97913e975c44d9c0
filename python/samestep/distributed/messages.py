"""Messages between two ranks under torch's names.

A message matches only receives with its tag in the same group. Messages of one sender with one tag stay in order.
"""

from __future__ import annotations

from typing import Any

from samestep import internal
from samestep.backend import Backend
from samestep.distributed import buffers, groups
from samestep.distributed.groups import WORLD
from samestep.distributed.requests import Request, started
from samestep.errors import InvalidArgumentError, TimeoutError
from samestep.group.objects import ANY

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
    of = groups.resolve(group)
    if of is None:
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
    of = groups.resolve(group)
    if of is None:
        return _NON_MEMBER
    request = _start_recv(of, "recv", tensor, src, tag, group_src)
    try:
        sender: int = request.wait(of.timeout)
    except TimeoutError:
        request._inner.cancel()
        raise
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

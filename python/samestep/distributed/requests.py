"""Operations in progress, as torch.distributed returns them; none is lost when its request is dropped."""

from __future__ import annotations

import atexit
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from samestep import _core
from samestep._util.deadline import Deadline
from samestep.errors import Error
from samestep.group.group import Group
from samestep.group.work import Enqueued, Works
from samestep.rendezvous.store import seconds_of
from samestep.world import crash_report

__all__ = ["Request"]

_DRAIN_S = 1.0  # to complete dropped requests when all ranks finish
_MIN_TO_SWEEP = 32  # this many requests are kept without a search for completed ones


class Request(Works):
    """An operation in progress: what the functions return with `async_op=True`, and `isend` and `irecv` always.

    Any number may be outstanding, in any mixture, and be waited for in any order. One that is dropped is
    still completed.

    Example:
      >>> import numpy as np, samestep.distributed as dist
      >>> dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
      >>> request = dist.all_reduce(np.ones(3), async_op=True)
      >>> request.wait(), request.is_completed()
      (None, True)
      >>> dist.destroy_process_group()
    """

    __slots__ = ("_given_up",)

    def is_completed(self) -> bool:
        """Make progress. True once the operation has ended, with its result in the buffers or with an error."""
        return self.done()

    def wait(self, timeout: timedelta | float | None = None, *, host: bool = False) -> Any:
        """Block until the operation has ended, and return what the function returns without `async_op`.

        Args:
          timeout: a timedelta or seconds, after which TimeoutError is raised and `wait` may be called again.
            None: the group's timeout, after which the group ends.
          host: also block this process until the device has finished, see `samestep.Work.wait`.

        Raises:
          Error: the error of the operation, in every call.
        """
        return self._wait_all(None if timeout is None else seconds_of(timeout), timeout is None, host)

    def _give_up(self) -> None:
        """The group ends now, and this request is no longer waited for."""
        self._given_up = True
        for work in self._all:
            work.cancel()

    def __del__(self) -> None:
        if not getattr(self, "_given_up", False):
            super().__del__()


_outstanding: weakref.WeakKeyDictionary[Group, list[Request]] = weakref.WeakKeyDictionary()


def started(
    of: Group,
    work: _core.Work | Enqueued,
    finish: Callable[[], Any] | None,
    async_op: bool,
    deadline: Deadline | None = None,
    *,
    writes: Sequence[Any] = (),
) -> Any:
    """The return value of a function that has started an operation: the request, or the result after waiting.

    `deadline`: of the call, if it has already waited. `writes`: the arrays that `finish` writes.
    """
    enqueued = work if isinstance(work, Enqueued) else Enqueued(work)
    request = Request([enqueued.inner], of.timeout, enqueued.finish(finish), enqueued.require_ready)
    if async_op:
        if writes or enqueued.writes:
            enqueued.inner.claim([*writes, *enqueued.writes], request)
        return _kept(of, request)
    return request._wait_all(None if deadline is None else deadline.left(), abandon=True, wait_on_host=False)


@functools.cache
def _register_at_exit() -> None:
    atexit.register(_at_exit)  # registered after the world's own hook, so it runs before


def _kept(of: Group, request: Request) -> Request:
    _register_at_exit()
    kept = _outstanding.setdefault(of, [])
    kept.append(request)
    if len(kept) >= _MIN_TO_SWEEP and len(kept) & (len(kept) - 1) == 0:  # less often the more there are
        kept[:] = [other for other in kept if not other.done()]
    return request


def drain(groups: Iterable[Group], *, receives: bool = True) -> None:
    """Complete the dropped requests of these groups within a short time; cancel the others.

    Args:
      groups: those that are about to end.
      receives: also wait for receives.
    """
    deadline = time.monotonic() + _DRAIN_S
    for request in [request for of in groups for request in _outstanding.pop(of, [])]:
        left = deadline - time.monotonic()
        try:
            if not request.done() and left > 0 and (receives or not request._inner.cancel()):
                request.wait(left)
        except Error:  # the request was dropped: nobody reads its error
            pass
        if not request.done():
            request._give_up()


def _at_exit() -> None:
    if crash_report.last_uncaught() is None:
        drain([of for of in _outstanding if not of.closed], receives=False)
    for kept in list(_outstanding.values()):
        for request in kept:
            request._give_up()

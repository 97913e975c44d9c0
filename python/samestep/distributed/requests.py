"""Operations under way, as torch.distributed returns them; none is lost when its request is dropped."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from samestep import _core, uncaught
from samestep.backend import Backend
from samestep.errors import Error
from samestep.rendezvous.store import seconds_of
from samestep.work import Deadline, Works

__all__ = ["Request"]

_DRAIN_S = 1.0  # for what was dropped, where all ranks have come to the end
_FEW = 32  # requests that are not worth looking through


class Request(Works):
    """An operation under way: what the functions return with `async_op=True`, and `isend` and `irecv` always.

    Any number may be outstanding, in any mixture, and be waited for in any order. One that is dropped is
    carried out all the same.

    Example:
      >>> import numpy as np, samestep.distributed as dist
      >>> dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
      >>> request = dist.all_reduce(np.ones(3), async_op=True)
      >>> request.wait(), request.is_completed()
      (None, True)
      >>> dist.destroy_process_group()
    """

    __slots__ = ("_given_up",)

    def __init__(
        self, inner: Sequence[_core.Work], timeout: float, finish: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(inner, timeout, finish)
        self._given_up = False

    def is_completed(self) -> bool:
        """Make progress; True once the operation has ended, well or not, and its buffers hold the result."""
        return self.done()

    def wait(self, timeout: timedelta | float | None = None, *, host: bool = False) -> Any:
        """Block until the operation has ended, and return what the function returns without `async_op`.

        Args:
          timeout: a timedelta or seconds, after which TimeoutError is raised and `wait` may be called again.
            None: the group's timeout, which ends the group where it runs out.
          host: wait in this process also for the device, as `samestep.Work.wait` says.

        Raises:
          Error: what went wrong in the operation, each time it is asked.
        """
        return self._wait_all(None if timeout is None else seconds_of(timeout), timeout is None, host)

    def _wait_blocking(self, timeout: float | None) -> Any:
        return self.wait(timeout)

    def _give_up(self) -> None:
        """The group ends now: nobody waits for this any more."""
        self._given_up = True
        for work in self._all:
            work.cancel()

    def __del__(self) -> None:
        if not getattr(self, "_given_up", True):  # __init__ may have failed
            super().__del__()


_outstanding: weakref.WeakKeyDictionary[Backend, list[Request]] = weakref.WeakKeyDictionary()
_at_exit_registered = False


def started(
    of: Backend,
    work: _core.Work | Sequence[_core.Work],
    finish: Callable[[], Any] | None,
    async_op: bool,
    deadline: Deadline | None = None,
) -> Any:
    """What a function returns whose operation has begun: its request, or the result after waiting.

    `deadline`: of the call, where it has waited already.
    """
    inner = [work] if isinstance(work, _core.Work) else work
    request = Request(inner, of.timeout, finish)
    if async_op:
        return _kept(of, request)
    return request._wait_all(None if deadline is None else deadline.left(), abandon=True, on_host=False)


def _kept(of: Backend, request: Request) -> Request:
    global _at_exit_registered  # noqa: PLW0603
    if not _at_exit_registered:
        _at_exit_registered = True
        atexit.register(_at_exit)  # after the world's own hook, and so before it
    kept = _outstanding.setdefault(of, [])
    kept.append(request)
    if len(kept) >= _FEW and len(kept) & (len(kept) - 1) == 0:  # rarely, the more there are
        kept[:] = [other for other in kept if not other.done()]
    return request


def drain(groups: Iterable[Backend], *, receives: bool = True) -> None:
    """Carries out what was dropped in these groups, as far as that is possible in a short time; gives up the rest.

    Args:
      groups: which are about to end.
      receives: wait for messages, too.
    """
    deadline = time.monotonic() + _DRAIN_S
    for request in [request for of in groups for request in _outstanding.pop(of, [])]:
        left = deadline - time.monotonic()
        try:
            if not request.done() and left > 0 and (receives or not request._inner.cancel()):
                request.wait(left)
        except Error:  # whoever dropped it does not want to know
            pass
        if not request.done():
            request._give_up()


def _at_exit() -> None:
    if uncaught.last_uncaught() is None:
        drain([of for of in _outstanding if not of.closed], receives=False)
    for kept in list(_outstanding.values()):
        for request in kept:
            request._give_up()

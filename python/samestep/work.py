"""Operations under way."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from samestep import _core
from samestep.errors import InvalidArgumentError, NotInitializedError

__all__ = ["Status", "Work", "Works", "seconds"]


def seconds(timeout: float) -> float:
    """A timeout that a user gave to a blocking call, checked before anything is started.

    Raises:
      InvalidArgumentError: it is no number > 0.
    """
    try:
        value = float(timeout)
    except (TypeError, ValueError):
        value = math.nan
    if not value > 0:
        raise InvalidArgumentError(f"timeout must be a number of seconds > 0, got {timeout!r}")
    return value


class Status(NamedTuple):
    """Where a received message came from."""

    source: int
    """Rank of the sender, in the group it was received on."""
    tag: int
    """The tag it was sent with."""
    count: int  # type: ignore[assignment]  # hides the method of tuples
    """Elements received."""


class Deadline:
    """The end of one call's time, for all of its steps."""

    __slots__ = ("_end",)

    def __init__(self, timeout: float) -> None:
        self._end = time.monotonic() + timeout

    def left(self) -> float:
        """Seconds, never below 0."""
        return max(0.0, self._end - time.monotonic())


class Limit(float):
    """Seconds that the caller of one blocking verb has given: this process waits, also for a device."""


class Work:
    """An operation under way: what every `i...` verb returns.

    Any number may be outstanding, and they may be waited for in any order. Waiting for one lets all
    advance. A `Work` that is dropped is waited for; it can also be awaited in a coroutine.

    Example:
      >>> import numpy as np, samestep as ss
      >>> backend = ss.initialize()
      >>> work = backend.iallreduce(np.ones(3))
      >>> work.wait()
      array([1., 1., 1.])
      >>> work.done(), work.exception()
      (True, None)
    """

    __slots__ = ("_finish", "_has_result", "_inner", "_result", "_timeout")

    def __init__(self, inner: _core.Work, timeout: float, finish: Callable[[], Any] | None = None) -> None:
        self._inner = inner
        self._timeout = timeout
        self._finish = finish
        self._has_result = False
        self._result: Any = None

    def done(self) -> bool:
        """Make progress; True once the operation has ended, well or not. Never blocks."""
        return self._inner.done()

    def wait(self, timeout: float | None = None, *, host: bool = False) -> Any:
        """Block until the operation has ended, and return what the blocking verb returns.

        For arrays in device memory it is not this process that waits but the stream in which the arrays are used:
        what is put into it from now on sees the result.

        Args:
          timeout: seconds to wait at most. Running out of it breaks nothing: `wait` may be called again.
            None: the group's timeout, which ends the group where it runs out.
          host: wait in this process also for the device, as with a timeout.

        Raises:
          TimeoutError: the time is over; says who has arrived and who has not.
          Error: what went wrong in the operation, each time it is asked.
        """
        limit = self._timeout if timeout is None else float(timeout)
        self._inner.wait(limit, timeout is None, host or timeout is not None)
        return self._take()

    def exception(self) -> BaseException | None:
        """What went wrong, or None; also None while the operation is under way."""
        return self._inner.exception() if self._inner.done() else None

    def _take(self) -> Any:
        if not self._has_result:
            self._result = self._finish() if self._finish is not None else None
            self._has_result = True
            self._finish = None
        return self._result

    def _wait_blocking(self, timeout: float | None) -> Any:
        limit = self._timeout if timeout is None else float(timeout)
        try:
            self._inner.wait(limit, True, timeout is not None or type(self._timeout) is Limit)
        except BaseException:
            self._leave()
            raise
        return self._take()

    def _leave(self) -> None:
        """The operation goes on by itself: a blocking call that has ended does not wait when this is dropped."""
        if hasattr(self, "_inner"):
            del self._inner

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # costs more to import than the rest of the package

        pause = 0.0
        while not self.done():
            yield from asyncio.sleep(pause).__await__()
            pause = min(pause + 1e-4, 5e-3)
        return self.wait(0.0)

    def __del__(self) -> None:
        inner = getattr(self, "_inner", None)  # __init__ may have failed
        try:
            if inner is not None and not inner.done():
                inner.wait(self._timeout, True)
        except Exception as error:
            _warn_dropped(error)

    def __repr__(self) -> str:
        try:
            state = "under way" if not self.done() else "failed" if self.exception() else "done"
        except AttributeError:  # see _leave
            state = "given up"
        return f"<samestep.Work: {state}>"


class Works(Work):
    """Several operations that make one, whose result is brought to its place when all have ended."""

    __slots__ = ("_all", "_failure")

    def __init__(
        self, inner: Sequence[_core.Work], timeout: float, finish: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(inner[-1], timeout, finish)
        self._failure: Exception | None = None
        self._all = inner

    def done(self) -> bool:
        """Make progress; True once all has ended, well or not, and the arrays hold the result."""
        ended = [work.done() for work in self._all]  # all of them make progress
        if all(ended) and not any(work.exception() for work in self._all):
            self._settle()
        return all(ended)

    def wait(self, timeout: float | None = None, *, host: bool = False) -> Any:
        """As `Work.wait`, for all of them."""
        return self._wait_all(timeout, timeout is None, host or timeout is not None)

    def exception(self) -> BaseException | None:
        """What went wrong, or None; also None while the operation is under way."""
        if not self.done():
            return None
        return next(filter(None, (work.exception() for work in self._all)), self._failure)

    def _wait_all(self, timeout: float | None, abandon: bool, on_host: bool) -> Any:
        deadline = Deadline(self._timeout if timeout is None else timeout)
        for work in self._all:
            work.wait(deadline.left(), abandon, on_host)
        self._settle()
        if self._failure is not None:
            raise self._failure
        return self._result

    def _wait_blocking(self, timeout: float | None) -> Any:
        try:
            return self._wait_all(timeout, True, timeout is not None or type(self._timeout) is Limit)
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        self._all = ()

    def _settle(self) -> None:
        """Brings the result to its place, once."""
        if self._has_result or self._failure is not None:
            return
        try:
            self._take()
        except Exception as error:
            self._failure = error

    def __del__(self) -> None:
        works = getattr(self, "_all", ())  # __init__ may have failed
        if not works or self._has_result or self._failure is not None:
            return
        try:
            if not all(work.done() for work in works) or not any(work.exception() for work in works):
                self._wait_blocking(None)
        except Exception as error:
            _warn_dropped(error)


def _warn_dropped(error: Exception) -> None:
    # A forked process drops its parent's operation.
    if isinstance(error, NotInitializedError) or sys.is_finalizing():
        return
    import logging

    logging.getLogger("samestep").warning("an operation dropped without wait() failed: %s", error)

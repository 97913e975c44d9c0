"""Pending operations."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from samestep import _core
from samestep._util.deadline import Deadline, seconds
from samestep._util.text import warn
from samestep.errors import Error, NotInitializedError, TimeoutError, UnavailableError

LOOK_S = 5e-3  # between two looks at an operation
_going_on: set[Any] = set()
"""Held until they end: a Work that is dropped would block the event loop until then."""


class _Ended:
    """Stands for an operation of the core that has ended."""

    def __init__(self, error: str = "") -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self, timeout: float, ends_group: bool, wait_on_host: bool = False) -> None:
        if self._error:
            raise TimeoutError(self._error)

    def exception(self) -> TimeoutError | None:
        return TimeoutError(self._error) if self._error else None

    def cancel(self) -> bool:
        return True

    def give_back(self) -> bool:
        return False


NOTHING: Any = _Ended()
"""A message to or from nobody."""
GIVEN_BACK: Any = _Ended("the await of this receive was cancelled; the next receive gets its message")
"""A receive whose await has been cancelled."""


def running_loop() -> Any:
    """The event loop that runs in this thread, or None."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and not sys.is_finalizing():
        with contextlib.suppress(RuntimeError):
            return asyncio.get_running_loop()
    return None


def go_on(work: Any) -> None:
    """Hold the work until it has ended, and let the running event loop, if there is one, make progress on it."""
    _going_on.difference_update([other for other in _going_on if other.done()])  # of loops that have ended
    loop = running_loop()
    if not work.done():
        _going_on.add(work)
        if loop is not None:  # otherwise other waits make progress on it
            loop.call_later(LOOK_S, _look_again, loop, work)


def _look_again(loop: Any, work: Any) -> None:
    if work.done():
        _going_on.discard(work)
    else:
        loop.call_later(LOOK_S, _look_again, loop, work)


_T = TypeVar("_T")


class Status(NamedTuple):
    """Source, tag and length of a received message."""

    source: int
    """Rank of the sender, in the group it was received on."""
    tag: int
    """The tag it was sent with."""
    count: int  # type: ignore[assignment]  # hides the method of tuples
    """Elements received."""


class Work(Generic[_T]):
    """A pending operation, as every `i...` method returns it.

    Any number of operations may be pending, and they may be waited for in any order; waiting for one makes progress
    on all. A `Work` that is garbage-collected first waits for its operation, and so does another operation on the same
    arrays, unless both only read them.

    `await work` works in coroutines. If the await is cancelled, as by `asyncio.wait_for`, a receive is cancelled: its
    array is undefined, and the next receive gets the message, even one that has just arrived. Other operations go on,
    and `work` may be awaited again.

    Example:
      >>> import numpy as np, samestep as ss
      >>> backend = ss.initialize()
      >>> work = backend.iallreduce(np.ones(3))
      >>> work.wait()
      array([1., 1., 1.])
      >>> work.done(), work.exception()
      (True, None)
    """

    __slots__ = ("_finish", "_finishing", "_has_result", "_inner", "_result", "_timeout")

    def __init__(self, inner: _core.Work, timeout: float, finish: Callable[[], _T] | None = None) -> None:
        self._has_result = False
        self._inner = inner
        self._timeout = timeout
        self._finish = finish
        # Held while the result is assembled, which one of the threads does that wait.
        self._finishing = None if finish is None else threading.RLock()
        self._result: Any = None

    def done(self) -> bool:
        """Make progress. Returns whether the operation has ended, with a result or an error. Never blocks."""
        return self._inner.done()

    def wait(self, timeout: float | None = None, *, host: bool = False) -> _T:
        """Wait until the operation has ended, and return the result of the blocking form.

        For device arrays the host does not wait: the stream in which the arrays are used waits, and work submitted
        to it afterwards sees the result.

        Args:
          timeout: most seconds to wait. The operation stays pending after a timeout, and `wait` may be called again.
            None for the group's timeout, which ends the group when it expires.
          host: also wait on the host for the device, as with a timeout.

        Raises:
          TimeoutError: the timeout has expired; names the ranks that are missing.
          Error: the error of the operation, in every call.
        """
        limit = self._timeout if timeout is None else seconds(timeout, "wait: timeout", may_be_over=True)
        self._inner.wait(limit, timeout is None, host or timeout is not None)
        return self._take()

    def exception(self) -> BaseException | None:
        """The error of the operation, or None; None while the operation is pending."""
        return self._inner.exception() if self._inner.done() else None

    def _take(self) -> _T:
        if self._finishing is not None and not self._has_result:
            with self._finishing:
                if self._finish is not None:
                    self._result = self._finish()
                    self._finish = None
        self._has_result = True
        result: _T = self._result
        return result

    def _wait_blocking(self, timeout: float | None = None) -> _T:
        limit = self._timeout if timeout is None else float(timeout)
        try:
            self._inner.wait(limit, True, timeout is not None)
        except BaseException:
            self._detach()
            raise
        return self._take()

    def _settle(self) -> None:
        """Complete it for another operation on its arrays; its error is left to those who wait for it."""
        try:
            self.wait()
        except Error:
            if not self.done():
                raise

    def _detach(self) -> None:
        """Forget the operation, so that `__del__` does not wait for it after a blocking call has failed."""
        if hasattr(self, "_inner"):
            del self._inner

    def __await__(self) -> Generator[Any, None, _T]:
        import asyncio  # costs more to import than the whole package

        pause = 0.0
        try:
            while not self.done():
                yield from asyncio.sleep(pause).__await__()
                pause = min(pause + 1e-4, LOOK_S)
        except BaseException:  # cancelled, or the coroutine is closed
            self._leave()
            raise
        return self.wait(0.0)

    def _leave(self) -> None:
        """Give back the message of a receive; let other operations go on without anybody who waits."""
        inner = self._inner
        if inner.give_back():
            self._inner = GIVEN_BACK
            go_on(inner)
        else:
            go_on(self)

    def __del__(self) -> None:
        inner = getattr(self, "_inner", None)  # __init__ may have failed
        try:
            if inner is None or self._has_result or inner.done():  # after a wait nothing is asked of a device
                return
            if running_loop() is not None:  # which a wait would block
                self._leave()
            else:
                inner.wait(self._timeout, True)
        except (Error, RuntimeError, MemoryError) as error:
            _warn_dropped(error)
        except BaseException as error:
            self._raise_later(error)

    def _raise_later(self, error: BaseException) -> None:
        """Raise what a signal handler has raised once this object is gone: Python ignores errors of `__del__`."""
        if threading.current_thread() is not threading.main_thread():
            raise error
        # Its traceback refers to this object, which would then never be freed.
        self._result = _core.RaisedLater(error.with_traceback(None))

    def __repr__(self) -> str:
        try:
            state = "in progress" if not self.done() else "failed" if self.exception() else "done"
        except AttributeError:  # see _detach
            state = "cancelled"
        return f"<samestep.Work: {state}>"


class Works(Work[Any]):
    """Several operations as one Work, whose result is assembled when all have ended."""

    __slots__ = ("__weakref__", "_all", "_failure", "_require_ready")

    def __init__(
        self,
        inner: Sequence[_core.Work],
        timeout: float,
        finish: Callable[[], Any] | None = None,
        require_ready: Callable[[], None] | None = None,
    ) -> None:
        """`require_ready` raises UnavailableError while `finish` must not be called; a later wait may succeed."""
        super().__init__(inner[-1], timeout, finish)
        self._require_ready = require_ready
        self._failure: Exception | None = None
        self._all = inner

    def done(self) -> bool:
        """Make progress. Returns whether all operations have ended and the arrays hold the result."""
        ended = [work.done() for work in self._all]  # all of them make progress
        if all(ended) and not any(work.exception() for work in self._all):
            try:
                self._deliver()
            except UnavailableError:  # not yet
                return False
        return all(ended)

    def wait(self, timeout: float | None = None, *, host: bool = False) -> Any:
        """As `Work.wait`, for all operations."""
        return self._wait_all(timeout, timeout is None, host or timeout is not None)

    def exception(self) -> BaseException | None:
        """The error of the operation, or None; None while the operation is pending."""
        if not self.done():
            return None
        return next(filter(None, (work.exception() for work in self._all)), self._failure)

    def _wait_all(self, timeout: float | None, abandon: bool, wait_on_host: bool) -> Any:
        limit = self._timeout if timeout is None else seconds(timeout, "wait: timeout", may_be_over=True)
        deadline = Deadline(limit)
        for work in self._all:
            work.wait(deadline.left(), abandon, wait_on_host)
        self._deliver()
        if self._failure is not None:
            raise self._failure
        return self._result

    def _wait_blocking(self, timeout: float | None = None) -> Any:
        try:
            return self._wait_all(timeout, True, timeout is not None)
        except BaseException:
            self._detach()
            raise

    def _detach(self) -> None:
        self._all = ()

    def _leave(self) -> None:
        go_on(self)

    def _deliver(self) -> None:
        """Assemble the result, once."""
        if self._has_result or self._failure is not None:
            return
        if self._require_ready is not None:
            self._require_ready()
        with self._finishing or contextlib.nullcontext():
            if self._failure is None:
                try:
                    self._take()
                except Exception as error:
                    self._failure = error

    def __del__(self) -> None:
        works = getattr(self, "_all", ())  # __init__ may have failed
        if not works or self._has_result or self._failure is not None:
            return
        try:
            ended = all(work.done() for work in works)
            if not ended and running_loop() is not None:
                self._leave()
            elif not ended or not any(work.exception() for work in works):
                self._wait_blocking(None)
        except Exception as error:
            _warn_dropped(error)
        except BaseException as error:
            self._raise_later(error)


class Enqueued(NamedTuple):
    """An operation that has been started, and what is left to do for its arrays once it has ended."""

    inner: _core.Work
    """As `Work` takes it."""
    complete: Callable[[], None] | None = None
    require_ready: Callable[[], None] | None = None
    """Raises UnavailableError while `complete` must not be called."""
    writes: Sequence[Any] = ()
    """The arrays that `complete` writes."""

    def finish(self, result: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Completes the arrays, and returns what `result` returns."""
        complete = self.complete
        if complete is None:
            return result

        def complete_first() -> Any:
            complete()
            return None if result is None else result()

        return complete_first

    def as_work(self, timeout: float, result: Callable[[], _T]) -> Work[_T]:
        """The Work of the operation, with the result that `result` returns."""
        if self.complete is None:
            return Work(self.inner, timeout, result)
        works = Works([self.inner], timeout, self.finish(result), self.require_ready)
        self.inner.claim(list(self.writes), works)
        return works


def _warn_dropped(error: Exception) -> None:
    # A forked process drops its parent's operation.
    if isinstance(error, NotInitializedError) or sys.is_finalizing():
        return
    warn(f"an operation dropped without wait() failed: {error}")

"""Operations that nobody waits for any more in a program of coroutines."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from samestep.errors import TimeoutError

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

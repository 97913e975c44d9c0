"""A thread that completes operations whose futures C++ may wait for, such as `torch.futures.wait_all`.

Nobody makes progress there. The thread is started with the first such future, and ends with the last one.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any

from samestep.errors import TimeoutError

_SLICE_S = 0.02  # for one of several operations: the next may end first
_GUARD_S = 1.0


class _Watcher:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._works: list[tuple[Any, float]] = []  # with their deadlines
        self._stops = False
        self._guard: threading.Thread | None = None
        self._guard_ends = threading.Event()

    def guard(self, works_of: Callable[[], list[Any]]) -> None:
        """Watch, from now on, each work that two looks, a second apart, find in `works_of()`."""
        if self._guard is None or not self._guard.is_alive():
            self._guard = threading.Thread(
                target=self._run_guard, args=(works_of,), name="samestep hooks", daemon=True
            )
            self._guard.start()

    def _run_guard(self, works_of: Callable[[], list[Any]]) -> None:
        before: list[Any] = []
        while not self._guard_ends.wait(_GUARD_S):
            works = works_of()
            for work in works:
                if any(work is earlier for earlier in before):
                    self.watch(work)
            before = works

    def watch(self, work: Any) -> None:
        """Complete a `samestep.torch.work.Work`, whatever the calling thread does."""
        with self._lock:
            if any(work is known for known, _ in self._works):
                return
            self._works.append((work, time.monotonic() + work._timeout))
            if self._thread is None or not self._thread.is_alive():  # nor is it after a fork
                self._thread = threading.Thread(target=self._run, name="samestep futures", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Before the interpreter ends, which must not find the thread in C++."""
        self._stops = True
        self._guard_ends.set()
        if self._thread is not None:
            self._thread.join(10 * _SLICE_S)

    def _run(self) -> None:
        while not self._stops:
            works = list(self._works)
            # Without the lock: a callback of a future may ask for another one.
            ended = [entry for entry in works if entry[0].is_completed()]
            with self._lock:
                self._works = [entry for entry in self._works if entry not in ended]
                if not self._works:
                    self._thread = None
                    return
            for work, end in works:
                _wait_briefly(work, end, _SLICE_S / len(works))


def _wait_briefly(work: Any, end: float, seconds: float) -> None:
    if time.monotonic() > end:
        work._complete(seconds, True)  # too late: as any wait would, it ends the group
        return
    try:
        work._complete(seconds, False)
    except TimeoutError:
        pass
    except Exception:  # the group has ended
        work._complete(seconds, True)


_watcher = _Watcher()
watch, guard = _watcher.watch, _watcher.guard
atexit.register(_watcher.stop)

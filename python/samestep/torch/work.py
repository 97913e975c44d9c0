"""Operations in progress, as torch.distributed sees them.

The start of an operation posts it, and any thread that waits makes progress. `wait` and `is_completed` do that; so
does reading a future from Python, and, because C++ may wait for it, a `_Watcher`. A future that autograd's
hooks have asked for is read from C++, after the backward pass: all of those are completed by a callback at the end of
the pass, in the order in which they were started, before the one in which DistributedDataParallel reads them. If a hook
itself waits in C++, that end never comes, so the thread completes what has been in progress for a second, too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from samestep import _core
from samestep._util.deadline import Deadline
from samestep.errors import Error, TimeoutError
from samestep.torch.errors import for_torch

_SLICE_S = 0.02  # for one of several operations: the next may end first
_GUARD_S = 1.0


class _Watcher:
    """A thread that completes operations whose futures C++ may wait for, such as `torch.futures.wait_all`.

    Nobody makes progress there. The thread is started with the first such future, and ends with the last one.
    """

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


_n_dispatch_modes, _n_function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


class without_autograd:
    """A context in which autograd does not record operations on tensors.

    A class with slots: `torch.no_grad` in a generator costs more than a short operation.
    """

    __slots__ = ("_modes", "_recorded")

    def __enter__(self) -> None:
        self._modes: contextlib.ExitStack | None = None
        if has_modes():
            from torch.utils._python_dispatch import _disable_current_modes

            self._modes = contextlib.ExitStack()
            self._modes.enter_context(_disable_current_modes())
            self._modes.enter_context(torch._C.DisableTorchFunction())
        self._recorded = torch.is_grad_enabled()
        if self._recorded:
            torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        if self._recorded:
            torch._C._set_grad_enabled(True)
        if self._modes is not None:
            self._modes.close()


def has_modes() -> bool:
    """Whether a mode of torch is active that intercepts all operations on tensors."""
    return bool(_n_dispatch_modes() or _n_function_modes())


_NO_TIME = timedelta(0)
_init_work = dist.Work.__init__


class Work(dist.Work):
    """One collective or message; several operations of the core if lists of tensors need them.

    Args:
      parts: the operations of the core, in the order of their start.
      result: tensors that are the result; `get_future` gives their list.
      timeout: seconds for all of it, unless `wait` gives another one.
      finish: copies the results into the user's tensors once all parts have ended.
    """

    def __init__(
        self,
        parts: Sequence[_core.Work],
        result: list[torch.Tensor],
        timeout: float,
        finish: Callable[[], None] | None = None,
    ) -> None:
        _init_work(self)
        self._parts = parts
        self._result = result
        self._timeout = timeout
        if finish is not None:
            self._finish = finish

    # Defaults on the class: setting them in each instance would take as long as a short operation.
    _ended = False
    _asked = False  # by `wait` or for a future
    _finish: Callable[[], None] | None = None
    _error: Exception | None = None
    _future: Future | None = None
    _ending: torch.futures.Future | None = None
    _source = -1

    # ---- what torch and its users call

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has ended. True, or raises its error.

        Args:
          timeout: None or 0: the timeout of the group, after which the group ends. After another timeout the
            group stays usable.
        """
        self._asked = True
        if not self._ended:
            if timeout is None or timeout <= _NO_TIME:
                self._complete(self._timeout, True)
            else:
                self._complete(timeout.total_seconds(), False)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Make progress. Whether the operation has ended, with or without an error."""
        if not self._ended and all(part.done() for part in self._parts):
            self._complete(self._timeout, True)
        return self._ended

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self._ended and self._error is None

    def exception(self) -> Exception | None:
        """The error, or None; None also while it is pending."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that are written."""
        return self._result

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """The future of the list of tensors.

        In a hook of autograd it completes at the end of the backward pass, or when it is read. Elsewhere a thread
        completes it, because C++ might wait for it without making progress.
        """
        self._asked = True
        if self._future is None:
            in_backward = not self._ended and _in_backward()
            if in_backward and self._result and self._result[0].dtype is torch.float16:
                # FP16_COMPRESS of DistributedDataParallel, in C++, takes nothing but a list of tensors of C++. Python
                # can make such a future only of a value that is there.
                self._try_wait()
                if self._error is None:
                    return torch._C.fork(self.result)  # `torch.jit.fork`, which warns
            self._future = Future(self)
            if self._ended:
                self._future.resolve()
            elif in_backward:
                _complete_after_backward(self)
            else:
                watch(self)
        return self._future

    def ending(self) -> torch.futures.Future:
        """A future for a profiler: it is set once the operation has ended, with or without an error."""
        self._ending = torch.futures.Future()
        if self._ended:
            self._ending.set_result(None)
        return self._ending

    def source_rank(self) -> int:
        """Of a message that was received: the sender's rank in the group."""
        return self._source

    _source_rank = source_rank

    # ---- how it ends

    def _complete(self, seconds: float, ends_group: bool) -> None:
        parts, failed = self._parts, None
        try:
            if len(parts) == 1:
                parts[0].wait(seconds, ends_group)
            else:
                deadline = Deadline(seconds)
                for part in parts:
                    part.wait(deadline.left(), ends_group)
        except Error as error:
            if not ends_group:
                if not all(part.done() for part in parts):
                    raise for_torch(error) from None
                # Another thread has completed it since, and the error may be that of this wait alone.
                self._complete(self._timeout, True)
                return
            failed = for_torch(error)
        # Of several threads that wait, one finishes. Callbacks of futures run without the lock.
        with self.__dict__.setdefault("_finishing", threading.Lock()):
            if self._ended:
                return
            self._error = failed
            try:
                self._store(parts)
            except Exception as error:  # it belongs to this operation alone, whoever makes it end
                self._error = for_torch(error)
            self._finish = None
            self._ended = True
            self._parts = ()
        self._tell()

    def _store(self, parts: Sequence[_core.Work]) -> None:
        if self._finish is not None and self._error is None:
            with without_autograd():
                self._finish()

    def _tell(self) -> None:
        if self._ending is not None:
            self._ending.set_result(None)
        if self._future is not None:
            self._future.resolve()

    def _try_wait(self) -> None:
        """Complete it, and leave its error to `wait` and `exception`."""
        if not self._ended:
            self._complete(self._timeout, True)

    _settle = _try_wait  # what the core calls before another operation uses the tensors

    def __del__(self) -> None:
        if not self._asked:
            _keep_for_cpp(self)


class Received(Work):
    """A receive."""

    def _store(self, parts: Sequence[_core.Work]) -> None:
        super()._store(parts)
        if self._error is None:
            self._source = parts[0].status().source


class Future(torch.futures.Future):
    """The future of a Work. Reading it in Python completes the Work."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def resolve(self) -> None:
        """Called when the Work has ended."""
        error = self._work.exception()
        if error is None:
            self.set_result(self._work.result())
        else:
            self.set_exception(error)

    def done(self) -> bool:
        """Make progress. Whether there is a result or an error."""
        self._work.is_completed()
        return bool(super().done())

    def wait(self) -> Any:
        """The result; raises the error of the operation."""
        self._work._try_wait()
        return super().wait()

    def value(self) -> Any:
        """The same."""
        self._work._try_wait()
        return super().value()

    def then(self, callback: Callable[[Any], Any]) -> Future:
        """A future of what `callback(self)` returns."""
        after = _ThenFuture(self._work)

        def act(future: Any) -> None:
            try:
                result = callback(future)
            except Exception as error:
                after.set_exception(error)
                _failed_after.error = error
            else:
                after.set_result(result)

        self.add_done_callback(act)
        return after


class _ThenFuture(Future):
    """The future that `then` returns: its callback sets it."""

    def resolve(self) -> None:
        pass


# ---- works that only C++ may still have

_MOST_DROPPED = 4096
_MOST_ELEMENTS = 1024  # of results that are kept
_dropped: deque[Work] = deque(maxlen=_MOST_DROPPED)


def _keep_for_cpp(work: Work) -> None:
    """Keep a Work that Python drops and of which nobody has asked anything.

    DistributedDataParallel.join gives such a Work to its reducer, which waits for it in the backward pass. C++ keeps
    no reference to the Python part of what it gets from Python, and without that part it would wait forever.
    """
    if not work._ended:  # the group keeps it until then, so the group has been freed
        work._error = for_torch(Error("the group was freed before this operation had ended"))
        work._ended, work._parts, work._finish = True, (), None
    if sum(tensor.numel() for tensor in work._result) > _MOST_ELEMENTS:
        work._result, work._future = [], Future(work)
        work._future.set_exception(
            Error("the result of this operation was freed when Python dropped its Work")
        )
    _dropped.append(work)


# ---- futures that C++ reads after the backward pass

_MOST_PASSES = 64  # in progress, in as many threads; of a pass that fails torch calls no callback
_awaited: dict[int, deque[Work]] = {}  # by backward pass


class _FailedAfter(threading.local):
    """The last error of a callback of a future, in the thread that has called it."""

    error: Exception | None = None


_failed_after = _FailedAfter()


def _in_backward() -> bool:
    """Whether a hook of a backward pass is running, and not a callback at its end."""
    return torch._C._current_graph_task_id() != -1 and torch._C._current_autograd_node() is not None


def _complete_after_backward(work: Work) -> None:
    this_pass = torch._C._current_graph_task_id()
    first: deque[Work] = deque()
    works = _awaited.setdefault(this_pass, first)  # threads of one pass may come at once, too
    works.append(work)
    if works is first:
        guard(_works_in_backward)
        while len(_awaited) > _MOST_PASSES:
            _awaited.pop(min(_awaited.copy()), None)
        complete = functools.partial(_complete_awaited, this_pass)
        torch.autograd.Variable._execution_engine.queue_callback(complete)


def _works_in_backward() -> list[Work]:
    return [work for works in tuple(_awaited.values()) for work in tuple(works) if not work._ended]


def _complete_awaited(this_pass: int) -> None:
    """Raises an error, if there was one: DistributedDataParallel would take it for a tensor."""
    _failed_after.error = None
    error: Exception | None = None
    for work in _awaited.pop(this_pass, ()):
        work._try_wait()
        error = error or work.exception()
    if error is None:
        error, _failed_after.error = _failed_after.error, None
    if error is not None:
        raise error

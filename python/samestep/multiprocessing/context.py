"""The parent's side of processes that `spawn` has started, and the exceptions it raises if one has failed."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from samestep.errors import Error
from samestep.launch.causes import ProcessExit, describe, root_cause


class ProcessException(Error, RuntimeError):
    """A process that `spawn` started has failed: the first one, in time."""

    __module__ = "samestep.multiprocessing"

    def __init__(self, text: str, error_index: int, error_pid: int) -> None:
        super().__init__(text)
        self.error_index = error_index
        """Which process: what its function got as first argument."""
        self.error_pid = error_pid
        """Its process id."""

    @property
    def pid(self) -> int:
        """The same as `error_pid`."""
        return self.error_pid

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """Its function has raised; the text has the traceback."""

    __module__ = "samestep.multiprocessing"


class ProcessExitedException(ProcessException):
    """It has exited with a code other than 0, or a signal has ended it."""

    __module__ = "samestep.multiprocessing"

    def __init__(
        self, text: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        super().__init__(text, error_index, error_pid)
        self.exit_code = exit_code
        """Minus the number of the signal, where one has ended it."""
        self.signal_name = signal_name
        """Such as "SIGSEGV"; None without one."""

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.error_index, self.error_pid, self.exit_code, self.signal_name)


_GRACE_S = 3.0  # between SIGTERM and SIGKILL
_CAUSE_S = 4.0  # for the process whose failure another one has noticed to fail visibly


class ProcessContext:
    """Processes that `spawn(..., join=False)` has started. Not to be constructed."""

    def __init__(self, started: Sequence[tuple[SpawnProcess, Connection]]) -> None:
        self._processes = [process for process, _ in started]
        self._pids = [process.pid or 0 for process in self._processes]
        self._reports = {i: report for i, (_, report) in enumerate(started)}
        self._errors: dict[int, dict[str, Any]] = {}
        self._endings: dict[int, ProcessExit] = {}
        self._signalled_at: float | None = None
        self._signals: tuple[int, ...] = ()
        self._noticed_at = math.inf
        self._failure: ProcessException | None = None

    def pids(self) -> list[int]:
        """Process ids, by index."""
        return list(self._pids)

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for all processes. If one fails, the others are stopped.

        Args:
          timeout: seconds to wait at most; None: until all have ended.
          grace_period: seconds between SIGTERM and SIGKILL to the others; None: 3.

        Returns:
          Whether all have ended; False where the time was over first.

        Raises:
          ProcessRaisedException: the function of the first process to fail has raised.
          ProcessExitedException: the first process to fail has exited or was killed.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while self._failure is None and len(self._endings) < len(self._processes):
                left = deadline - time.monotonic()
                self._wait(min(left, self._noticed_at + _CAUSE_S - time.monotonic()))
                if self._has_failed():
                    self._end(_GRACE_S if grace_period is None else grace_period)
                    self._failure = self._first_failure()
                elif left <= 0:
                    return len(self._endings) == len(self._processes)
        except KeyboardInterrupt:
            self._end(_GRACE_S)
            raise
        if self._failure is not None:
            raise self._failure
        return True

    def _wait(self, seconds: float) -> None:
        """Wait until a process has ended or reported an exception, and record the result."""
        running = {process.sentinel: i for i, process in enumerate(self._processes) if i not in self._endings}
        watched: list[Any] = [*running, *self._reports.values()]
        ready = wait(watched, None if math.isinf(seconds) else max(0.0, seconds))
        for i in [i for i, report in self._reports.items() if report in ready]:
            self._read(i)
        for i in [i for sentinel, i in running.items() if sentinel in ready]:
            if i in self._reports:
                self._read(i)
            process = self._processes[i]
            process.join()
            self._endings[i] = self._ending(i, process.exitcode)
            process.close()

    def _read(self, i: int) -> None:
        report = self._reports.pop(i)
        with report, contextlib.suppress(EOFError, OSError):
            self._errors[i] = json.loads(report.recv_bytes())

    def _ending(self, i: int, status: int | None) -> ProcessExit:
        signalled_at, signals = self._signalled_at, self._signals
        error = self._errors.get(i)
        return ProcessExit(
            f"process {i}",
            self._pids[i],
            status,
            time.time(),
            signalled_at,
            signals,
            error,
            rank=self._first_rank() + i,
        )

    def _first_rank(self) -> int:
        """The rank of process 0, if a process has reported its own: this may be one host of several."""
        known = (error["rank"] - i for i, error in self._errors.items() if error["rank"] is not None)
        return next(known, 0)

    def _failed(self) -> dict[int, ProcessExit]:
        """Processes that have failed by themselves; one that has raised may not have ended yet."""
        raised = {i: self._ending(i, 1) for i in self._errors if i not in self._endings}
        return {i: ending for i, ending in {**self._endings, **raised}.items() if ending.failed}

    def _has_failed(self) -> bool:
        """Whether it is time to end all: one has failed, and not only because of another one."""
        failed = self._failed()
        if not failed:
            return False
        self._noticed_at = min(self._noticed_at, time.monotonic())
        causes = [ending for ending in failed.values() if not ending.is_consequence]
        all_ended = len(self._endings) == len(self._processes)
        return bool(causes) or all_ended or time.monotonic() >= self._noticed_at + _CAUSE_S

    def _end(self, grace: float) -> None:
        """Ends all processes that still run; returns when none is left."""
        self._signalled_at = time.time()
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while len(self._endings) < len(self._processes):
            left = deadline - time.monotonic()
            if left <= 0 and signal.SIGKILL not in self._signals:
                self._send(signal.SIGKILL)
            self._wait(left if left > 0 else math.inf)

    def _send(self, signum: int) -> None:
        self._signals += (int(signum),)
        for i, process in enumerate(self._processes):
            if i not in self._endings:
                process.kill() if signum == signal.SIGKILL else process.terminate()

    def _first_failure(self) -> ProcessException:
        cause = root_cause(list(self._endings.values()))
        assert cause is not None
        root = cause.ending or cause.noticed
        index = next(i for i, ending in self._endings.items() if ending is root)
        assert root is not None
        if root is cause.noticed:
            return ProcessRaisedException(f"{cause}{_traceback(root)}", index, root.pid)
        if cause.noticed is None and root.error is not None:
            return ProcessRaisedException(_traceback(root), index, root.pid)
        status = int(root.status or 0)
        how = describe(status)
        name = how.removeprefix("signal ") if status < 0 else None
        text = f"process {index} terminated with {how}"
        if cause.noticed is not None:
            text = f"{cause}{_traceback(cause.noticed)}"
        return ProcessExitedException(text, index, root.pid, status, name)


def _traceback(ending: ProcessExit) -> str:
    error = ending.error or {}
    return (
        f"\n\n-- {ending.who.capitalize()} terminated with the following error:\n{error.get('traceback', '')}"
    )

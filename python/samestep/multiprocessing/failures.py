"""The exceptions raised if a process that `spawn` started has failed."""

from __future__ import annotations

from typing import Any

from samestep.errors import Error


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

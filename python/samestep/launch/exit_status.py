"""How one process ended: its description and its exit code. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CONSEQUENCES = ("PeerLostError", "TimeoutError")


@dataclass(frozen=True)
class ProcessExit:
    """How one process ended.

    Attributes:
      who: "rank 1", or "mpirun".
      pid: its process id, 0 if it was never started.
      status: exit code, or minus the signal that killed it. None: unknown, because the connection was lost.
      time: when, in seconds since the epoch.
      signalled_at: when it was first asked to end; None if it never was.
      signals: those that it was sent before it ended.
      error: what `samestep.world.crash_report` wrote about its uncaught exception: time, class, text, because.
      out_of_memory: the kernel of its host has killed a process for lack of memory while it ran.
      host: its host, if that is not the launcher's.
      ended_by: the process that asked it to end, if any did.
      rank: its number in the whole job; None if it is not a rank.
    """

    who: str
    pid: int
    status: int | None
    time: float
    signalled_at: float | None = None
    signals: tuple[int, ...] = ()
    error: Mapping[str, Any] | None = None
    out_of_memory: bool = False
    host: str = ""
    ended_by: str = "the launcher"
    rank: int | None = None

    @property
    def failed(self) -> bool:
        """It failed by itself, not because it was asked to end."""
        if self.status == 0:
            return False
        if self.signalled_at is None or self.status is None:
            return True
        if self.error is not None and self.error["time"] < self.signalled_at:
            return True
        return self.status < 0 and -self.status not in self.signals

    @property
    def is_consequence(self) -> bool:
        """Another rank's failure or absence ended it."""
        package, _, name = self._class.partition(".")
        return package == "samestep" and name.rpartition(".")[2] in _CONSEQUENCES

    @property
    def _class(self) -> str:
        """Of the exception; of the one it was raised because of, where that one names another rank's failure."""
        return str(self.error.get("because", self.error)["class"]) if self.error else ""

    @property
    def error_name(self) -> str:
        """The class of its exception without the module, or ""."""
        return self._class.rpartition(".")[2]

    @property
    def error_text(self) -> str:
        """The text of that exception, or ""."""
        return str(self.error.get("because", self.error).get("text", "")) if self.error else ""

    @property
    def since(self) -> float:
        """When it failed: an exception may take long to end its process."""
        return float(self.error["time"]) if self.error else self.time

    @property
    def exit_code(self) -> int:
        """As a shell has it: 128 + the signal; 1 if it is unknown, or for an uncaught exception."""
        if self.status is None or (self.failed and -self.status in self.signals):
            return 1
        return self.status if self.status >= 0 else 128 - self.status

    def __str__(self) -> str:
        return f"{self.name} {self.fate}"

    @property
    def name(self) -> str:
        """Who it is: rank, process id, and host where that is another one."""
        where = f" on {self.host}" if self.host else ""
        return f"{self.who} (pid {self.pid}{where})"

    @property
    def fate(self) -> str:
        """How it ended, in short."""
        if self.status is None:
            return "lost: its connection broke"
        if self.failed and self.error and -self.status in self.signals:
            return "uncaught exception"
        killed = self.failed and self.out_of_memory and self.status == -signal.SIGKILL
        return (
            describe(self.status)
            + ", perhaps because the host or its control group was out of memory" * killed
        )


def describe(status: int) -> str:
    """Example: describe(7) is "exit code 7", describe(-9) is "signal SIGKILL"."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"

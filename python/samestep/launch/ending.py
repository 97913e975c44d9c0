"""How a run ended: whose fault it was, what to say about it, and the exit code. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CONSEQUENCES = ("PeerLostError", "TimeoutError")


@dataclass(frozen=True)
class Ending:
    """How one process ended.

    Attributes:
      who: "rank 1", or "mpirun".
      pid: its process, 0 if it never was one.
      status: exit code, or minus the signal that killed it. None: it was lost from sight.
      time: when, in seconds since the epoch.
      signalled_at: when it was first asked to end; None if it never was.
      signals: what it was sent before it ended.
      error: what `samestep.uncaught` wrote about its uncaught exception: time, class, text.
      host: its host, if that is not the launcher's.
      ended_by: who asked it to end, if anybody did.
    """

    who: str
    pid: int
    status: int | None
    time: float
    signalled_at: float | None = None
    signals: tuple[int, ...] = ()
    error: Mapping[str, Any] | None = None
    host: str = ""
    ended_by: str = "the launcher"

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
        package = str(self.error["class"]).partition(".")[0] if self.error else ""
        return package == "samestep" and self.error_name in _CONSEQUENCES

    @property
    def error_name(self) -> str:
        """The class of its uncaught exception without the module, or ""."""
        return str(self.error["class"]).rpartition(".")[2] if self.error else ""

    @property
    def since(self) -> float:
        """When it failed: an exception may take long to end its process."""
        return float(self.error["time"]) if self.error else self.time

    @property
    def exit_code(self) -> int:
        """As a shell has it: 128 + the signal; 1 where it is unknown, or of an uncaught exception."""
        if self.status is None or (self.failed and -self.status in self.signals):
            return 1
        return self.status if self.status >= 0 else 128 - self.status

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        who = f"{self.who} (pid {self.pid}{where})"
        if self.status is None:
            return f"{who} lost: its connection broke"
        if self.failed and self.error and -self.status in self.signals:
            return f"{who} uncaught {self.error_name}"
        return f"{who} {describe(self.status)}"


def describe(status: int) -> str:
    """Example: describe(7) is "exit code 7", describe(-9) is "signal SIGKILL"."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def root_cause(endings: Sequence[Ending]) -> Ending | None:
    """The first to fail, in time; one that only lost a peer or waited in vain counts after all others.

    Example:
      >>> lost = {"time": 1.0, "class": "samestep.errors.PeerLostError"}
      >>> str(root_cause([Ending("rank 0", 40, 1, 1.1, error=lost), Ending("rank 1", 41, -9, 1.2)]))
      'rank 1 (pid 41) signal SIGKILL'
    """
    failed = [ending for ending in endings if ending.failed]
    return min(failed, key=lambda ending: (ending.is_consequence, ending.since), default=None)


def others(endings: Sequence[Ending], root: Ending) -> list[str]:
    """One line for each other process that was ended or failed later, in the given order."""
    lines = []
    for ending in endings:
        if ending is root or ending.status == 0:
            continue
        if not ending.failed:
            lines.append(f"{ending}, ended by {ending.ended_by}")
        elif ending.is_consequence:
            lines.append(f"{ending}, in consequence ({ending.error_name})")
        else:
            lines.append(f"{ending}, later")
    return lines


def ranks_text(numbers: Sequence[int]) -> str:
    """Names ranks briefly; `numbers` ascend.

    Example:
      >>> ranks_text([0, 1, 2, 5]), ranks_text([3]), ranks_text([])
      ('ranks 0-2, 5', 'rank 3', 'no rank')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}" if text else "no rank"

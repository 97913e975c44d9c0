"""How processes have ended, and the root cause of a failed run. Pure.

The root cause is the first failure in time and in causality. A rank that only noticed that another one was lost or late
names that one in its error. This chain of names leads to the rank that failed by itself, left early or hangs.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
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


_MAX_TEXT = 300
_WITHOUT_INPUT = ("EOFError", "BdbQuit")  # what input() and breakpoint() raise at its end
# The wording of the errors of the package. "rank 1 (rank 3 of the world, host b)" where the group is not the world.
_WHERE = r"(?: \(([^()]*)\))?"
_LOST = re.compile(
    rf"\brank (\d+){_WHERE} has (?:left|ended)(?: group '[^']*' because of rank (\d+) of the world)?"
)
_LATE = re.compile(
    r"(?: s for|nothing came from) ranks? (\d[^;:]*)|\branks? (\d[-\d, and]*) of \d+ did not join"
)
_RANKS = re.compile(rf"(\d+)(?:-(\d+))?{_WHERE}")
_OF_WORLD = re.compile(r"rank (\d+) of the world")
_GROUP = re.compile(r"group '([^']*)'")


@dataclass(frozen=True)
class Cause:
    """The cause of a failed run.

    Attributes:
      ending: how the rank at fault ended; None for a rank of another run, of which only its name is known.
      noticed: the failure that names this rank, if it did not fail by itself.
      rank: its number in the whole job; None if it is not a rank.
    """

    ending: ProcessExit | None
    noticed: ProcessExit | None = None
    rank: int | None = None

    @property
    def time(self) -> float:
        """When it happened, or was noticed."""
        if self.ending is not None and (self.noticed is None or self.ending.status == 0):
            return self.ending.since
        assert self.noticed is not None
        return self.noticed.since

    @property
    def exit_code(self) -> int:
        """The exit code of the rank that failed, or of the one that noticed; never 0."""
        failure = self.noticed or self.ending
        assert failure is not None
        return failure.exit_code

    @property
    def is_disagreement(self) -> bool:
        """All ranks have failed, because they do not agree, and none of them alone is the cause."""
        return self.ending is not None and self.ending.error_name == "MismatchError"

    def __str__(self) -> str:
        if self.noticed is None:
            if self.ending and self.is_disagreement:
                return _disagreement(self.ending)
            message = _message(self.ending) if self.ending else ""
            return f"{self.ending}: {message}" if message else str(self.ending)
        if self.ending is None:
            what = f"rank {self.rank}, which another run has started"
        elif self.ending.status == 0:
            what = f"{self.ending} while others still waited for it"
        else:
            late = self.noticed.error_name == "TimeoutError"
            what = f"{self.ending.name} {'never arrived' if late else 'left the group'}"
        return f"{what}; {self.noticed.who} raised {_message(self.noticed)}"


def _message(failure: ProcessExit) -> str:
    """Class and first line of an exception, as the last line of a traceback has them; "" without one."""
    lines = failure.error_text.strip().splitlines()
    without_input = failure.error_name in _WITHOUT_INPUT and failure.rank != 0
    hint = " (only the first rank has standard input; debug with -n 1)" if without_input else ""
    return failure.error_name + (f": {lines[0][:_MAX_TEXT]}" if lines else "") + hint


def _disagreement(failure: ProcessExit) -> str:
    """What the ranks do not agree on."""
    lines = failure.error_text.strip().splitlines() or [""]
    where, found, calls = lines[0].partition(": the ranks do not agree. ")
    text = f" ({where}): {calls.partition('. ')[0]}" if found else f": {where}"
    return f"the ranks do not agree{text[:_MAX_TEXT]}"


def root_cause(endings: Sequence[ProcessExit]) -> Cause | None:
    """The cause of the failures among `endings`, or None.

    Example:
      >>> late = {"time": 3.0, "class": "samestep.TimeoutError", "text": "rank 0: has waited 2 s for rank 1; ..."}
      >>> waited = ProcessExit("rank 0", 40, 1, 3.1, error=late, rank=0)
      >>> stuck = ProcessExit("rank 1", 41, -15, 4.0, signalled_at=3.5, signals=(15,), rank=1)
      >>> print(str(root_cause([waited, stuck])).partition(";")[0])
      rank 1 (pid 41) never arrived
    """
    by_rank = {ending.rank: ending for ending in endings if ending.rank is not None}
    known: list[Cause] = []
    unknown: list[Cause] = []
    for failure in sorted((ending for ending in endings if ending.failed), key=lambda ending: ending.since):
        cause = _cause_of(failure, by_rank, set())
        (known if cause else unknown).append(cause or Cause(failure, rank=failure.rank))
    return min(known or unknown, key=lambda cause: cause.time, default=None)


def _cause_of(
    failure: ProcessExit, by_rank: Mapping[int, ProcessExit], seen: set[int | None]
) -> Cause | None:
    """The end of the chain of names that begins with `failure`; None if it names no rank, or if it is a cycle."""
    if not failure.is_consequence:
        return Cause(failure, rank=failure.rank)
    named = [rank for rank in ranks_named(failure) if rank not in seen]
    absent = [rank for rank in named if rank not in by_rank or not by_rank[rank].failed]
    failed = [by_rank[rank] for rank in named if rank not in absent]
    if by_itself := min(
        (one for one in failed if not one.is_consequence), key=lambda e: e.since, default=None
    ):
        return Cause(by_itself, rank=by_itself.rank)
    if absent:
        return Cause(by_rank.get(absent[0]), failure, absent[0])
    causes = (_cause_of(one, by_rank, {*seen, failure.rank}) for one in failed)
    return next((cause for cause in causes if cause), None)


def ranks_named(failure: ProcessExit) -> list[int]:
    """The ranks of the world that the error of `failure` names as lost or late; [] if it names none.

    Example:
      >>> error = {"time": 1.0, "class": "samestep.PeerLostError", "text": "barrier: rank 2 (b) has left group 'world'"}
      >>> ranks_named(ProcessExit("rank 0", 40, 1, 1.1, error=error))
      [2]
    """
    text = failure.error_text
    if failure.error_name == "PeerLostError":
        found = [(cause or rank, "", "" if cause else where) for rank, where, cause in _LOST.findall(text)]
        of_world = bool(re.search("because of rank", text))
    else:
        late = _LATE.search(text)
        found = _RANKS.findall(late[1] or late[2]) if late else []
        of_world = False
    group = _GROUP.search(text)
    of_world = of_world or group is None or group[1] == "world"
    named: list[int] = []
    for first, last, where in found:
        if inside := _OF_WORLD.search(where):
            named.append(int(inside[1]))
        elif of_world:
            named += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(named))


def others(endings: Sequence[ProcessExit], root: Cause) -> list[str]:
    """One line for each other process that was ended or failed later, in the given order."""
    lines = []
    for ending in endings:
        if ending.status == 0 or (ending is root.ending and not root.is_disagreement):
            continue
        if not ending.failed:
            lines.append(f"{ending}, ended by {ending.ended_by}")
        elif ending.is_consequence:
            lines.append(f"{ending}, in consequence ({ending.error_name})")
        elif root.ending and ending.error_text and ending.error_text == root.ending.error_text:
            lines.append(f"{ending}, with the same {ending.error_name}")
        else:
            lines.append(f"{ending}, later")
    return lines

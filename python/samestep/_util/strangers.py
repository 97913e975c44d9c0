"""Connections to a port that have not yet proved that they belong to the job."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable

_PROOF_S = 10.0  # for a connection to prove itself
_STOPPED_S = 3.0  # more than the owner's loop sleeps: nothing could arrive in this time
_MAX_CONNECTIONS = 512


class Strangers:
    """Limits what strangers can hold: so many connections, each for so long, and one line in the log for all.

    One connection too many ends the oldest. A process of the job proves itself soon, and there is room for all of
    them at once beside the strangers, so it is none.

    Args:
      port: which it is, for the text: "the port of rank 0".
      say: logs a text; called once.
      n_expected: processes of the job that may connect at the same time.

    Attributes:
      most: connections at a time.

    Example:
      >>> strangers = Strangers("the port of rank 0", print)
      >>> strangers.report("10.0.0.9:1234", "it does not know the secret")
      a stranger at the port of rank 0, from 10.0.0.9:1234, was disconnected: it does not know the secret; \
others after it will be, too, without a line each
      >>> strangers.report("10.0.0.9:1235", "it does not know the secret")
    """

    def __init__(self, port: str, say: Callable[[str], None], n_expected: int = 0) -> None:
        self._port, self._say = port, say
        self.most = min(_MAX_CONNECTIONS, _descriptors() // 4) + n_expected
        self._deadlines: dict[socket.socket, float] = {}  # in the order in which they came
        self._looked_at = 0.0
        self.n_reported = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, link: socket.socket) -> socket.socket | None:
        """Counts a new connection; returns the one that has to be closed to make room."""
        oldest = next(iter(self._deadlines)) if len(self._deadlines) >= self.most else None
        if oldest is not None:
            del self._deadlines[oldest]
        now = time.monotonic()
        if not self._deadlines:
            self._looked_at = now
        self._deadlines[link] = now + _PROOF_S
        return oldest

    def remove(self, link: socket.socket) -> None:
        """It has proved itself, or is closed."""
        self._deadlines.pop(link, None)

    def late(self) -> list[socket.socket]:
        """Those whose time is over, which does not pass while this process is stopped; to be called every second."""
        now = time.monotonic()
        gap, self._looked_at = now - self._looked_at, now
        if gap > _STOPPED_S:
            self._deadlines = {link: deadline + gap for link, deadline in self._deadlines.items()}
        found = []
        for link, deadline in self._deadlines.items():
            if deadline > now:
                break
            found.append(link)
        return found

    def seconds_left(self) -> float | None:
        """Until the first one's time is over; None without any."""
        first = next(iter(self._deadlines.values()), None)
        return None if first is None else max(0.0, first - time.monotonic())

    def all(self) -> list[socket.socket]:
        """All that are connected."""
        return list(self._deadlines)

    def report(self, address: str, why: str) -> None:
        """Says that one was disconnected; the first time only."""
        self.n_reported += 1
        if self.n_reported == 1:
            self._say(
                f"a stranger at {self._port}, from {address}, was disconnected: {why}; others after it will be, too, "
                "without a line each"
            )


def _descriptors() -> int:
    """How many this process may have; strangers must not take those that it needs itself."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4 * _MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else limit

"""Shows the user how far a run is."""

from __future__ import annotations

import contextlib
import os
import sys
import time

DEFAULT_TERMINAL = "/dev/tty"

_WIDTH = 24
_FORWARDED = 0.05  # seconds in which the launcher brings a line of output to the terminal
_EVERY = 15.0  # seconds between lines where there is no terminal


def clock(seconds: float) -> str:
    """Minutes and seconds.

    Example:
      >>> clock(65.4), clock(-3)
      ('1:05', '0:00')
    """
    whole = max(0, int(seconds))
    return f"{whole // 60}:{whole % 60:02}"


def bar(done: int, of: int, left: float, what: str) -> str:
    """The text of the bar.

    Example:
      >>> bar(1, 4, 65, "bcast 8 B")
      '━━━━━━──────────────────  1/4  1:05 left  bcast 8 B'
    """
    full = _WIDTH * done // max(of, 1)
    return f"{'━' * full}{'─' * (_WIDTH - full)}  {done}/{of}  {clock(left)} left  {what}"


class Progress:
    """A bar on a terminal, or the same as a line now and then on standard error where there is none.

    The terminal is opened by its name: under a launcher standard error is a pipe, and standard output may be a
    terminal of the launcher's own.
    """

    def __init__(self, terminal: str = DEFAULT_TERMINAL, *, shown: bool) -> None:
        self._tty = -1
        self._shown, self._next = shown, time.monotonic() + _EVERY
        if shown:
            with contextlib.suppress(OSError):
                self._tty = os.open(terminal, os.O_WRONLY | os.O_NOCTTY)

    def update(self, done: int, of: int, left: float, what: str) -> None:
        """Shows that `done` of `of` are done, `left` seconds remain and `what` is next."""
        if self._tty >= 0:
            time.sleep(_FORWARDED)
            self._write(f"\r\x1b[K{bar(done, of, left, what)[:100]}")
        elif self._shown and time.monotonic() > self._next:
            self._next = time.monotonic() + _EVERY
            print(bar(done, of, left, what), file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Makes room for a line of output."""
        self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        if self._tty >= 0:
            with contextlib.suppress(OSError):
                os.write(self._tty, text.encode())

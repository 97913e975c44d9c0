"""Which terminals can redraw an unfinished line."""

from __future__ import annotations

import os
from collections.abc import Mapping


def redraws(fd: int, env: Mapping[str, str] = os.environ) -> bool:
    """Whether `fd` is an interactive terminal whose last line can be redrawn.

    A pseudo-terminal whose output ends in a file or a web page, as of a CI service or a notebook, shows each new state
    behind the one before. It is recognised by `TERM`, which is missing or "dumb"; by a width of 0, which nobody has
    set; by `CI`, which CI services set; or by `JPY_PARENT_PID`, which Jupyter sets for its kernels.

    Example:
      >>> redraws(0, {"TERM": "dumb"})
      False
    """
    if env.get("TERM", "") in ("", "dumb") or env.get("CI", "").lower() not in ("", "0", "false"):
        return False
    try:
        return "JPY_PARENT_PID" not in env and os.isatty(fd) and os.get_terminal_size(fd).columns > 0
    except OSError:
        return False


def columns(fd: int) -> int:
    """The width of the terminal `fd`, 80 where it cannot be known."""
    try:
        return os.get_terminal_size(fd).columns or 80
    except OSError:
        return 80

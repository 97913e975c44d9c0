"""Printing from many ranks without mixing their lines."""

from __future__ import annotations

import sys
import time

from samestep import _core
from samestep.group import json_exchange
from samestep.group.group import Group


def write(backend: Group, text: str, *, end: str, timeout: float | None = None) -> None:
    """Write each rank's `text` in order of rank, with a head on each line and `end` behind it. Collective.

    Rank 0 does the writing, so a launcher cannot interleave the lines.
    """
    begin = head(backend.rank, backend.size)
    mine = "\n".join(begin + line for line in text.split("\n")) + end
    with _core.UserCall("println"):
        texts = json_exchange.gather(backend._comm, mine, str, 0, backend._seconds(timeout))
    if texts is not None:
        sys.stdout.write("".join(texts))
        sys.stdout.flush()


def head(rank: int, size: int) -> str:
    """What a line begins with; matches `LINE_HEAD`."""
    return f"{now()} [{rank} / {size}] "


def now() -> str:
    """This host's local time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S")

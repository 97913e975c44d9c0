"""Forwards standard input to rank 0, where that is not a child of this process, or a terminal is read.

Elsewhere rank 0 has the descriptor itself: what it does not read stays there, for example for the loop of a shell that
starts one run per line. A terminal is for the processes of its session, which ranks are not.

Not through `mpirun`: that of Open MPI 5 loses the end of the input (seen with 5.0.11), and repeats parts
of inputs above 64 KiB (https://github.com/openpmix/prrte/issues/2579).
"""

from __future__ import annotations

import os
from collections.abc import Callable

from samestep.launch.loop import Loop

_MAX_ON_THE_WAY = 1 << 18  # bytes that the rank has not read yet
_AT_ONCE = 1 << 16


class StandardInput:
    """Reads descriptor 0 no faster than the rank does, and only while this process is in the foreground.

    Args:
      loop: watches descriptor 0 while there is room.
      send: called with the data; b"" is the end.
    """

    def __init__(self, loop: Loop, send: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._send = send
        self._on_the_way = 0
        self._ended = False
        self._is_terminal = os.isatty(0)

    def taken(self, nbytes: int) -> None:
        """The rank has read `nbytes` more."""
        self._on_the_way -= nbytes

    def watch(self) -> None:
        """Start or stop reading: reads if there is room and this is the foreground process."""
        room = self._on_the_way + _AT_ONCE <= _MAX_ON_THE_WAY
        wanted = room and not self._ended and self._may_read()
        self._loop.reading(0, self._read if wanted else None)

    def _may_read(self) -> bool:
        """The kernel stops a background process that reads its terminal."""
        try:
            return not self._is_terminal or os.tcgetpgrp(0) == os.getpgrp()
        except OSError:  # the terminal is gone
            return False

    def _read(self) -> None:
        if not self._may_read():
            return
        try:
            data = os.read(0, _AT_ONCE)
        except OSError:
            data = b""
        self._ended = not data
        self._on_the_way += len(data)
        self._send(data)

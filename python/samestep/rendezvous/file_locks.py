"""Locks on single bytes of an open file, which end with the process that holds them.

Locks of the open file description (Linux): unlike those of `fcntl.lockf` they hold between threads, too, and do not
end when another descriptor of the same file is closed. The bytes lie far behind the contents.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterator

from samestep.errors import TimeoutError

TURN = 1 << 40
"""Held exclusively for the time of one operation."""
ALIVE = TURN + 1
"""Shared by all processes that have the store open."""

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01


def _try(fd: int, kind: int, byte: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, says POSIX
        return False
    return True


@contextlib.contextmanager
def exclusive(fd: int, byte: int, timeout: float, what: str) -> Iterator[None]:
    """Holds `byte` alone.

    Raises:
      TimeoutError: another process has held it for `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE_S
    while not _try(fd, fcntl.F_WRLCK, byte):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{what}: another process has kept it locked for {timeout:g} s; is one stopped?"
            )
        time.sleep(pause)  # not the waiting form of the lock, which has no deadline
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    try:
        yield
    finally:
        _try(fd, fcntl.F_UNLCK, byte)


def is_free(fd: int, byte: int) -> bool:
    """Whether nobody else holds or shares `byte`."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return int(_FLOCK.unpack(answer)[0]) == fcntl.F_UNLCK


def share(fd: int, byte: int) -> None:
    """Shares `byte` until `fd` is closed; for use under `exclusive` of another byte."""
    _try(fd, fcntl.F_RDLCK, byte)

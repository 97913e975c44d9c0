"""The descriptors 0, 1 and 2."""

from __future__ import annotations

import os


def open_closed() -> None:
    """Open those that are closed on /dev/null, so that no connection of ours gets the number that prints go to."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)

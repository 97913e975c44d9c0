"""What a rank does to itself: it runs out of something, or a descriptor is no longer what it was."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import socket
import stat
from pathlib import Path

PR_SET_DUMPABLE = 4  # linux/prctl.h
KINDS = ("memory", "nofile", "close", "replace", "shut", "undumpable")


def strike(kind: str, draw: random.Random, keep: set[int]) -> None:
    """Do it to this process. `keep`: descriptors that the program itself needs."""
    if kind == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, used + draw.choice([0, 1 << 20, 64 << 20]))
    elif kind == "nofile":
        _limit(resource.RLIMIT_NOFILE, max(_descriptors()) + 1)
    elif kind == "undumpable":  # others may no longer read or write its memory (ptrace(2))
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    else:
        found = [fd for fd in _descriptors() if fd > 2 and fd not in keep]
        sockets = [fd for fd in found if stat.S_ISSOCK(os.fstat(fd).st_mode)]
        if kind == "shut":
            for fd in draw.sample(sockets, min(1, len(sockets))):
                with socket.socket(fileno=os.dup(fd)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)
        elif kind == "close":
            os.close(draw.choice(found))
        else:
            other = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            os.dup2(other, draw.choice(found), inheritable=False)
            os.close(other)


def _descriptors() -> list[int]:
    """Those that are open now."""
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _limit(what: int, most: int) -> None:
    resource.setrlimit(what, (most, resource.getrlimit(what)[1]))

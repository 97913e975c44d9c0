"""Linux calls by which no process is lost: signals on a parent's death, orphans, the process tree."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


def die_with_parent(parent: int, signum: int) -> None:
    """Has the kernel send `signum` to this process when `parent`, which has to be its parent, ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum))
    if os.getppid() != parent:  # it ended before the call above
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends (a subreaper)."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int) -> list[int]:
    """The processes below `root`, without those that have ended and wait to be reaped."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:  # it ended meanwhile
            continue
        if state not in b"ZX":
            children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    unseen = [root]
    while unseen:
        below = children.get(unseen.pop(), [])
        found += below
        unseen += below
    return found


def send_signal(pids: Iterable[int], signum: int) -> None:
    """Sends `signum` to those of `pids` that still exist; -p stands for process group p."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def n_out_of_memory() -> int:
    """How many processes of this host the kernel has killed for lack of memory; 0 where it does not count them."""
    try:
        with open("/proc/vmstat", "rb") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(b"oom_kill ")), 0)
    except OSError:
        return 0


def reap() -> Iterable[tuple[int, int]]:
    """Yields (pid, status) of each child that has ended; status is an exit code, or minus a signal."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)

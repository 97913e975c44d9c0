"""Pending operations of a group, and its collective shutdown."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import weakref
from collections import deque
from datetime import timedelta

from samestep import _core, internal
from samestep._util.text import error_line
from samestep.backend import Backend
from samestep.errors import Error
from samestep.torch.work import Work
from samestep.world import crash_report

_PARTING_S = 5.0  # torch's destroy_process_group is not collective: a rank may never call it
_LEAVING_S = 1.0


class GroupShutdown:
    """Keeps a reference to every Work until it has ended, and closes the group."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pid = os.getpid()
        self._works: deque[Work] = deque()
        _open.add(self)

    def under_way(self, work: Work) -> None:
        """A Work that has been started."""
        works = self._works
        while works and (works[0]._ended or works[0].is_completed()):
            works.popleft()
        works.append(work)

    def end(self) -> None:
        """Complete pending operations, wait for the other ranks for at most 5 s, and leave the group. Idempotent."""
        if not self._begin_end():
            return
        self._drain(_PARTING_S)
        try:
            self._backend.close(timeout=min(_PARTING_S, self._backend.timeout))
        except Error as error:
            self._abandon(f"its group had ended: {error}")

    def leave(self, reason: str) -> None:
        """Leave without waiting for the other ranks, which get the reason in their errors. Idempotent."""
        if self._begin_end():
            self._abandon(reason)

    def leave_at_exit(self) -> None:
        """For a process that ends without `destroy_process_group`: messages are delivered first."""
        error = crash_report.last_uncaught()
        if error is None and os.getpid() == self._pid:
            self._drain(_LEAVING_S)
        ended = "its process ended" if error is None else f"its process ended with {error_line(error)}"
        self.leave(ended)
        if error is not None and "mpi4py.MPI" in sys.modules:
            # MPI_Finalize waits for all ranks. A rank that never learns of this error must not block this one forever.
            late = f"not all ranks have ended {self._backend.timeout:g} s later"
            _core.exit_watchdog(
                self._backend.timeout, 1, f"samestep: this rank ended with an error, and {late}"
            )

    def _begin_end(self) -> bool:
        """Whether this call ends the group: the first one, in the process that has opened it."""
        if self not in _open or os.getpid() != self._pid:
            return False
        _open.discard(self)
        return True

    def _drain(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for work in self._works:
            left = max(1e-3, end - time.monotonic())
            with contextlib.suppress(Exception):
                work.wait(timedelta(seconds=left))
        self._works.clear()

    def _abandon(self, reason: str) -> None:
        with contextlib.suppress(Error):
            internal.abandon(self._backend, reason)
        with contextlib.suppress(Error):
            internal.communicator(self._backend).close(_LEAVING_S)


_open: weakref.WeakSet[GroupShutdown] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    for lifetime in list(_open):
        lifetime.leave_at_exit()

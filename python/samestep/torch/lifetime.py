"""From the opening of a group to its end: what is under way, and how ranks part."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import weakref
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING

from samestep import _core, uncaught
from samestep.errors import Error

if TYPE_CHECKING:
    from samestep.backend import Backend
    from samestep.torch.work import Work

__all__ = ["Lifetime"]

_PARTING_S = 5.0  # torch's destroy_process_group is not collective: a rank may never call it
_LEAVING_S = 1.0
_FEW, _SMALL = 256, 8  # works, and elements of their results


class Lifetime:
    """Keeps every Work until it has ended, whether or not its caller does, and ends the group.

    Args:
      backend: the group.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pid = os.getpid()
        self._works: deque[Work] = deque()
        self._recent: deque[Work] = deque(maxlen=_FEW)
        self._over = False
        _open.add(self)

    def under_way(self, work: Work) -> None:
        """A Work that has been started."""
        works = self._works
        while works and works[0].is_completed():
            works.popleft()
        works.append(work)
        # DistributedDataParallel.join hands one of these to C++, which waits for it in the backward pass. C++ does not
        # keep the half of an object that is Python's, and without that it would wait for ever.
        if sum(tensor.numel() for tensor in work.result()) <= _SMALL:
            self._recent.append(work)

    def end(self) -> None:
        """Completes what is under way and parts from the others, who are waited for 5 s at most. Idempotent."""
        if self._over or os.getpid() != self._pid:
            return
        self._over = True
        _open.discard(self)
        self._drain(_PARTING_S)
        try:
            self._backend.close(timeout=min(_PARTING_S, self._backend.timeout))
        except Error as error:
            self._abandon(f"its group had ended: {error}")

    def leave(self, reason: str) -> None:
        """Leaves without the others, who are told the reason. Idempotent."""
        if self._over or os.getpid() != self._pid:
            return
        self._over = True
        _open.discard(self)
        self._abandon(reason)

    def leave_at_exit(self) -> None:
        """For a process that ends without `destroy_process_group`: messages are delivered first."""
        error = uncaught.last_uncaught()
        if error is None and os.getpid() == self._pid:
            self._drain(_LEAVING_S)
        ended = (
            "its process ended"
            if error is None
            else f"its process ended with {type(error).__name__}: {error}"
        )
        self.leave(ended)
        if error is not None and "mpi4py.MPI" in sys.modules:
            # MPI_Finalize waits for all ranks. One that never learns of this error must not hold us for ever.
            late = f"not all ranks have ended {self._backend.timeout:g} s later"
            _core.exit_later(self._backend.timeout, 1, f"samestep: this rank ended with an error, and {late}")

    def _drain(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for work in self._works:
            left = max(1e-3, end - time.monotonic())
            with contextlib.suppress(Exception):
                work.wait(timedelta(seconds=left))
        self._works.clear()
        self._recent.clear()

    def _abandon(self, reason: str) -> None:
        with contextlib.suppress(Error):
            self._backend._abandon(reason)
            self._backend._closed = True
        with contextlib.suppress(Error):
            self._backend._comm.close(_LEAVING_S)


_open: weakref.WeakSet[Lifetime] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    for lifetime in list(_open):
        lifetime.leave_at_exit()

"""Which ranks have reached `initialize` under MPI, which cannot report missing ones: ranks publish their names."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any

_LATE_S = 1.0
_ANSWER_S = 5.0
_calls = itertools.count()


class PresenceRecord:
    """One rendezvous of all ranks. A rank that has waited for one second publishes its name (MPI_Publish_name).

    Launchers need not support names; then the missing ranks are unknown. They may answer late or never, so a thread
    makes these calls.

    Example:
      >>> with PresenceRecord(None, rank=0, size=2) as call:  # for MPI itself: `mpi4py.MPI`
      ...     call.missing()
      []
    """

    def __init__(self, mpi: Any, rank: int, size: int) -> None:
        self._mpi = mpi
        self._rank, self._size = rank, size
        self._job = f"samestep {os.environ.get('PMIX_NAMESPACE', '')} {next(_calls)}"
        self._over, self._ended = threading.Event(), threading.Event()
        self._asked = False
        self._missing: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PresenceRecord:
        if self._mpi is not None and self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE:
            self._thread.start()
        else:
            self._ended.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def missing(self) -> list[int]:
        """The ranks known to be missing. To be called when this rank has stopped waiting."""
        self._asked = True
        self._over.set()
        return self._missing if self._ended.wait(_ANSWER_S) else []

    def _run(self) -> None:
        try:
            self._over.wait(_LATE_S)
            if self._over.is_set() and not self._asked:
                return
            self._mpi.Publish_name(self._name(self._rank), "here")
            self._over.wait()
            if self._asked:
                missing = [rank for rank in range(self._size) if not self._has_arrived(rank)]
                self._missing = missing if len(missing) < self._size else []
        except self._mpi.Exception:  # the launcher does not support names
            pass
        finally:
            self._ended.set()

    def _name(self, rank: int) -> str:
        return f"{self._job} {rank}"

    def _has_arrived(self, rank: int) -> bool:
        try:
            self._mpi.Lookup_name(self._name(rank))
        except self._mpi.Exception:
            return False
        return True

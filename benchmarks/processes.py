"""The ranks of a benchmark, and how they meet without any of the contenders."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

T = TypeVar("T")
Array = np.ndarray[Any, Any]

_LINE = 8  # int64s in a cache line


class Ranks:
    """The ranks of the job, all on one host.

    `barrier` is a page of shared memory and `sched_yield`: the same for every contender, and none of theirs.
    """

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        same_host = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        if same_host.size != self.size:
            raise SystemExit(f"all ranks must be on one host: {same_host.size} of {self.size} are")
        self._slots = memoryview(self._shared_page()).cast("q")
        self._others = [rank * _LINE for rank in range(self.size) if rank != self.rank]
        self._turn = 0

    def _shared_page(self) -> mmap.mmap:
        nbytes = self.size * _LINE * 8
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        path = ""
        if self.rank == 0:
            handle, path = tempfile.mkstemp(prefix="samestep-benchmark-", dir=folder)
            os.ftruncate(handle, nbytes)
            os.close(handle)
        path = self._comm.bcast(path)
        with open(path, "r+b") as file:
            page = mmap.mmap(file.fileno(), nbytes)
        self._comm.Barrier()
        if self.rank == 0:
            os.unlink(path)
        return page

    def barrier(self, pause: Callable[[], None] = os.sched_yield) -> None:
        """Returns once all ranks are here; `pause` is called while they are not."""
        self._turn += 1
        turn, slots = self._turn, self._slots
        slots[self.rank * _LINE] = turn
        for slot in self._others:
            while slots[slot] < turn:
                pause()

    def longest(self, starts: Array, ends: Array) -> Array:
        """Nanoseconds of the slowest rank, element by element."""
        span = ends - starts
        self._comm.Allreduce(MPI.IN_PLACE, span, MPI.MAX)
        return span

    def span(self, starts: Array, ends: Array) -> Array:
        """Nanoseconds from the first rank's start to the last one's end, element by element."""
        first, last = np.empty_like(starts), np.empty_like(ends)
        self._comm.Allreduce(starts, first, MPI.MIN)
        self._comm.Allreduce(ends, last, MPI.MAX)
        return last - first

    def total(self, value: float) -> float:
        """The sum over all ranks, the same bits everywhere."""
        return float(sum(self._comm.allgather(value)))

    def agree(self, value: T) -> T:
        """Rank 0's value."""
        return self._comm.bcast(value)  # type: ignore[no-any-return]

    def first_of(self, text: str) -> str:
        """The first text of any rank that is not empty; "" if all are."""
        return next(filter(None, self._comm.allgather(text)), "")

    def together(self, values: set[int]) -> set[int]:
        """The union of all ranks' sets."""
        return set().union(*self._comm.allgather(values))

    def alone(self, work: Callable[[], T]) -> T:
        """Rank 0 does `work` while the others sleep; everyone gets its result."""
        result = work() if self.rank == 0 else None
        self.barrier(pause=lambda: time.sleep(0.005))
        return self.agree(result)  # type: ignore[return-value]

"""Contenders take turns in the same processes; a call takes as long as it takes the slowest rank."""

from __future__ import annotations

import gc
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import machine
import numpy as np
from contenders import Contender
from mpi4py import MPI
from problems import Array, Buffers, Problem, build

T = TypeVar("T")

DISTURBED = 0.1
"""Cores that others may use before a measurement counts as disturbed."""

_LINE = 8  # int64s in a cache line
_BURST_NS = 50_000_000  # about the longest run of calls without a barrier
_PROBE_CALLS, _PROBES = 20, 3  # to learn how long a call takes


class Ranks:
    """The ranks of the job, all on one host, and how they meet.

    `barrier` is a page of shared memory and `sched_yield`: the same for every contender, and none of theirs.
    """

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        on_host = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        if on_host.size != self.size:
            raise SystemExit(f"all ranks must be on one host: {on_host.size} of {self.size} are")
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

    def longest(self, times: Array) -> Array:
        """The largest of all ranks, element by element."""
        out = np.empty_like(times)
        self._comm.Allreduce(times, out, MPI.MAX)
        return out

    def total(self, value: float) -> float:
        """The sum over all ranks, the same bits everywhere."""
        return float(sum(self._comm.allgather(value)))

    def agree(self, value: T) -> T:
        """Rank 0's value."""
        return self._comm.bcast(value)  # type: ignore[no-any-return]

    def together(self, values: set[int]) -> set[int]:
        """The union of all ranks' sets."""
        return set().union(*self._comm.allgather(values))

    def alone(self, work: Callable[[], T]) -> T:
        """Rank 0 does `work` while the others sleep; everyone gets its result."""
        result = work() if self.rank == 0 else None
        self.barrier(pause=lambda: time.sleep(0.005))
        return self.agree(result)  # type: ignore[return-value]


class Others:
    """How many cores processes outside the job used, of those it may run on, since this was made.

    Good to about 0.02 / (seconds since) cores for each core.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._cpus = ranks.together(os.sched_getaffinity(0))
        self._start = self._now()

    def cores(self) -> float:
        """The same on all ranks; at least 0."""
        wall, ours, busy = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return self._ranks.agree(max(0.0, (busy - self._ranks.total(ours)) / wall))

    def _now(self) -> tuple[float, float, float]:
        return time.monotonic(), machine.own_seconds(), machine.busy_seconds(self._cpus)


@dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes:
      rounds: turns of each contender at each point.
      block: seconds of one turn.
      burst: most calls in a row back to back.
    """

    rounds: int
    block: float
    burst: int


@dataclass(frozen=True)
class Summary:
    """What one contender needed at one point, in microseconds per call."""

    statement: str
    median_us: float
    p99_us: float
    min_us: float
    measurements: int
    calls_in_a_row: int


@dataclass(frozen=True)
class Point:
    """One verb at one size in one mode.

    Attributes:
      verb, nbytes: as in `Problem`.
      mode: "single": each call after a barrier; "b2b": back to back, many calls in a row.
      summaries: by contender.
      others: cores that other processes used meanwhile.
    """

    verb: str
    nbytes: int
    mode: str
    summaries: dict[str, Summary]
    others: float

    @property
    def disturbed(self) -> bool:
        """Whether the figures should not be quoted."""
        return self.others > DISTURBED


class _Lane:
    """One contender at one point."""

    def __init__(self, ranks: Ranks, contender: Contender, problem: Problem) -> None:
        self._ranks, self._problem, self.contender = ranks, problem, contender
        self._buffers: Buffers = problem.buffers(contender.allocate)
        self._timed = contender.timed(problem.verb, self._buffers, ranks.rank, ranks.size)
        self._times: list[Array] = []
        self.burst = self.iterations = 1

    def verify(self) -> None:
        """Compares every element of one call's results."""
        self._iterate(1)
        self._fail_if(self._problem.check_all(self._buffers, 1))

    def typical(self, calls: int) -> tuple[float, float]:
        """Nanoseconds of one call where `calls` are made in a row, and of all that is done around those."""
        self._iterate(calls)
        start = time.perf_counter_ns()
        in_calls = float(np.median([self._iterate(calls) for _ in range(_PROBES)]))
        whole = (time.perf_counter_ns() - start) / _PROBES
        return self._ranks.agree((in_calls / calls, max(whole - in_calls, 1)))

    def block(self) -> None:
        """One turn."""
        times = np.empty(self.iterations, np.int64)
        for i in range(self.iterations):
            times[i] = self._iterate(self.burst)
        self._times.append(self._ranks.longest(times) / self.burst / 1000)

    def summary(self) -> Summary:
        times = np.concatenate(self._times)
        median, p99 = np.percentile(times, [50, 99])
        statement = self.contender.statements[self._problem.verb]
        return Summary(statement, float(median), float(p99), float(times.min()), times.size, self.burst)

    def _iterate(self, calls: int) -> int:
        self._problem.rewrite(self._buffers)
        self._ranks.barrier()
        took = self._timed(calls)
        self._fail_if(self._problem.check(self._buffers, calls))
        return took

    def _fail_if(self, wrong: str) -> None:
        if wrong:
            raise RuntimeError(f"{self.contender.name} is wrong: {wrong}")


def measure(
    ranks: Ranks,
    contenders: Sequence[Contender],
    *,
    verb: str,
    nbytes: int,
    mode: str,
    settings: Settings,
) -> Point:
    """Times one verb at one size: blocks of the contenders in turn, their order rotated and reversed.

    Raises:
      RuntimeError: a result is wrong.
    """
    problem = build(verb, nbytes, ranks.rank, ranks.size)
    lanes = [_Lane(ranks, contender, problem) for contender in contenders if verb in contender.statements]
    gc.collect()
    gc.disable()
    try:
        for lane in lanes:
            lane.verify()
        _plan_blocks(lanes, mode, settings)
        others = Others(ranks)
        for turn in range(settings.rounds):
            first = turn // 2 % len(lanes)
            order = lanes[first:] + lanes[:first]
            for lane in reversed(order) if turn % 2 else order:
                lane.block()
        cores = others.cores()
    finally:
        gc.enable()
    return Point(verb, problem.nbytes, mode, {lane.contender.name: lane.summary() for lane in lanes}, cores)


def _plan_blocks(lanes: Sequence[_Lane], mode: str, settings: Settings) -> None:
    """Sets calls in a row, the same for all contenders, and iterations so that blocks take as long as asked."""
    probe = min(settings.burst, _PROBE_CALLS) if mode == "b2b" else 1
    costs = [lane.typical(probe) for lane in lanes]
    burst = (
        int(np.clip(_BURST_NS / max(call for call, _ in costs), probe, settings.burst)) if probe > 1 else 1
    )
    for lane, (call, around) in zip(lanes, costs, strict=True):
        lane.burst = burst
        lane.iterations = int(np.clip(settings.block * 1e9 / (call * burst + around), 3, 10_000))

"""Contenders take turns in the same processes; a call takes as long as it takes the slowest rank."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import disturbance
import numpy as np
from contenders import Contender
from disturbance import Use, Watch
from problems import FLOAT32, Array, Buffers, Problem, build, numpy_dtype
from processes import Ranks
from results import AS_FLOAT32, Cell, Point, Summary

_BURST_NS = 50_000_000  # about the longest run of calls without a barrier
_PROBE_CALLS, _PROBES = 20, 3  # to learn how long a call takes
_LEAST, _MOST = 2, 10_000  # measurements in a turn


class WrongResultError(RuntimeError):
    """A contender's result differs from the right answer."""


@dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes:
      rounds: turns for each contender in each cell.
      burst: most calls in a row back to back.
    """

    rounds: int
    burst: int


@dataclass(frozen=True)
class Measured:
    """A point, and what did not take part in it: contender -> why."""

    point: Point
    refused: dict[str, str]


class _Lane:
    """One contender in one cell."""

    def __init__(self, ranks: Ranks, name: str, contender: Contender, problem: Problem, verb: str) -> None:
        self._ranks, self._problem, self._contender, self._verb = ranks, problem, contender, verb
        self.name = name
        self._buffers: Buffers = problem.buffers(contender.allocate)
        self._rounds: list[Array] = []
        self.burst = self.iterations = 1

    def refuses(self) -> str:
        """Makes one call and compares every element. Why the contender cannot do it; "" if it can. Collective."""
        why = ""
        try:
            self._timed = self._contender.timed(self._verb, self._buffers, self._ranks.rank, self._ranks.size)
            self._iterate(1, check=False)
        except Exception as error:
            if not self._contender.may_fail:
                raise
            why = f"{type(error).__name__}: {error}"
        if not why:
            self._fail_if(self._problem.check_all(self._buffers, 1))
        return self._ranks.first_of(why)

    def typical(self, calls: int) -> tuple[float, float]:
        """Nanoseconds of one call where `calls` are made in a row, and of all that is done around those."""
        start, end = self._iterate(calls)
        probes = 1 if self._ranks.agree(end - start > _BURST_NS) else _PROBES
        begin = time.perf_counter_ns()
        seconds = [end - start for start, end in (self._iterate(calls) for _ in range(probes))]
        whole = (time.perf_counter_ns() - begin) / probes
        in_calls = float(np.median(seconds))
        return self._ranks.agree((in_calls / calls, max(whole - in_calls, 1)))

    def turn(self) -> None:
        """One turn: measurements of which each has all its arrays rewritten before."""
        starts, ends = np.empty((2, self.iterations), np.int64)
        for i in range(self.iterations):
            starts[i], ends[i] = self._iterate(self.burst)
        seconds = (
            self._ranks.span(starts, ends) if self._contender.spans else self._ranks.longest(starts, ends)
        )
        self._rounds.append(seconds / self.burst / 1000)

    def summary(self, kept: Sequence[int]) -> Summary:
        """Over these rounds."""
        rounds = [self._rounds[i] for i in kept]
        times = np.concatenate(rounds)
        median, p99 = np.percentile(times, [50, 99])
        return Summary(
            statement=self._contender.statements[self._verb],
            median_us=float(median),
            p99_us=float(p99),
            min_us=float(times.min()),
            rounds_us=[float(np.median(found)) for found in rounds],
            measurements=times.size,
            calls_in_a_row=self.burst,
        )

    def _iterate(self, calls: int, *, check: bool = True) -> tuple[int, int]:
        self._problem.rewrite(self._buffers)
        self._ranks.barrier()
        moments = self._timed(calls)
        if check:
            self._fail_if(self._problem.check(self._buffers, calls))
        return moments

    def _fail_if(self, wrong: str) -> None:
        if wrong:
            raise WrongResultError(f"{self.name} is wrong: {wrong}")


def measure(
    ranks: Ranks, contenders: Sequence[Contender], cell: Cell, settings: Settings, seconds: float
) -> Measured:
    """Times one verb at one size in rounds; in each, every contender has a turn. Collective.

    Their order is rotated and reversed from round to round. Disturbed rounds are made again, at most as many
    times as there are rounds and while twice the time has not passed.

    Args:
      ranks: who takes part.
      contenders: those without the verb or the dtype take no part.
      cell: what to measure.
      settings: how many rounds.
      seconds: about how long it may take, all contenders together; big arrays may take longer.

    Raises:
      WrongResultError: a result is wrong.
    """
    begin = time.monotonic()
    gc.collect()
    gc.disable()
    try:
        lanes, refused = _lanes(ranks, contenders, cell)
        if not lanes:
            raise SystemExit(f"none of the contenders has {cell}: {refused}")
        spent = time.monotonic() - begin
        turn = max(0.0, seconds - spent) / settings.rounds / len(lanes)
        _plan_turns(lanes, cell.mode, settings.burst, ranks.agree(turn))
        rounds = _rounds(ranks, lanes, settings.rounds, begin + 2 * seconds)
    finally:
        gc.enable()
    kept = disturbance.kept(rounds)
    quietest = [rounds[i] for i in kept]
    use = disturbance.together(quietest)
    point = Point(
        cell=cell,
        summaries={lane.name: lane.summary(kept) for lane in lanes},
        rounds=len(kept),
        left_out=len(rounds) - len(kept),
        others=use.others,
        disturbed=use.disturbed or quietest[0].disturbed,
        seconds=time.monotonic() - begin,
    )
    return Measured(point, refused)


def _lanes(ranks: Ranks, contenders: Sequence[Contender], cell: Cell) -> tuple[list[_Lane], dict[str, str]]:
    lanes, refused = [], {}
    build_once = functools.cache(functools.partial(build, rank=ranks.rank, size=ranks.size))
    for contender in contenders:
        if not contender.has(cell):
            continue
        problem = build_once(contender.instead.get(cell.verb, cell.verb), cell.nbytes, dtype=cell.dtype)
        lane = _Lane(ranks, contender.name, contender, problem, cell.verb)
        if why := lane.refuses():
            refused[contender.name] = why
        else:
            lanes.append(lane)
        if contender.name == "shared" and cell.dtype != FLOAT32:
            count = cell.nbytes // numpy_dtype(cell.dtype).itemsize
            same = build_once(cell.verb, count * numpy_dtype(FLOAT32).itemsize, dtype=FLOAT32)
            lanes.append(_Lane(ranks, AS_FLOAT32, contender, same, cell.verb))
            lanes[-1].refuses()
    return lanes, refused


def _plan_turns(lanes: Sequence[_Lane], mode: str, most_calls: int, seconds: float) -> None:
    """Sets calls in a row and measurements so that each turn takes about as long as asked."""
    for lane in lanes:
        probe = min(most_calls, _PROBE_CALLS) if mode == "b2b" else 1
        call, around = lane.typical(probe)
        if mode == "b2b":
            lane.burst = int(np.clip(_BURST_NS / call, probe, most_calls))
        lane.iterations = int(np.clip(seconds * 1e9 / (call * lane.burst + around), _LEAST, _MOST))


def _rounds(ranks: Ranks, lanes: Sequence[_Lane], wanted: int, until: float) -> list[Use]:
    """Makes rounds until `wanted` were undisturbed; what others used in each."""
    rounds: list[Use] = []
    quiet = 0
    while quiet < wanted and len(rounds) < 2 * wanted:
        if len(rounds) >= wanted and ranks.agree(time.monotonic() > until):
            break
        turn = len(rounds)
        first = turn // 2 % len(lanes)
        order = [*lanes[first:], *lanes[:first]]
        watch = Watch(ranks)
        for lane in reversed(order) if turn % 2 else order:
            lane.turn()
        rounds.append(watch.use())
        quiet += not rounds[-1].disturbed
    return rounds

"""What samestep must reach beside its rivals, and whether a result reaches it.

    python benchmarks/goals.py RESULT.json [RESULT.json ...] [--require]

All of it is for the ranks of one host and float32 unless said otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import results
from results import AS_FLOAT32, KIB, LIMIT, MIB, Cell, Point, Result

IMPORT_MS = 60.0
"""`import samestep` may take this much longer than `import numpy`."""

RANKS = (2, 4)
"""Goals for a number of ranks exist for these."""

# (ours, rival, mode): ranks -> size -> how many times faster than the rival, at least
FASTER: Mapping[tuple[str, str, str], Mapping[int, Mapping[int, float]]] = {
    ("shared", "mpi4py", "single"): {
        2: {64 * KIB: 4.0, MIB: 3.2, 16 * MIB: 3.2, 64 * MIB: 5.5},
        4: {64 * KIB: 4.0, MIB: 4.2, 16 * MIB: 3.5, 64 * MIB: 6.0},
    },
    ("samestep", "mpi4py", "single"): {
        2: {64 * KIB: 2.2, 256 * KIB: 1.5, MIB: 1.5, 16 * MIB: 1.5, 64 * MIB: 3.3},
        4: {64 * KIB: 3.0, 256 * KIB: 1.6, MIB: 1.5, 16 * MIB: 1.7, 64 * MIB: 3.0},
    },
    ("shared", "gloo", "single"): {
        2: {MIB: 30, 16 * MIB: 9, 64 * MIB: 7},
        4: {MIB: 20, 16 * MIB: 7, 64 * MIB: 7},
    },
    ("samestep", "mpi4py", "b2b"): {
        2: {8: 4.0, 64: 4.0, KIB: 5.0, 4 * KIB: 4.0},
        4: {8: 3.5, 64: 3.5, KIB: 5.0, 4 * KIB: 6.0},
    },
}

# ranks -> size -> most times the limit, for `shared`
OVER_LIMIT: Mapping[int, Mapping[int, float]] = {
    2: {MIB: 1.6, 16 * MIB: 1.15, 64 * MIB: 1.15},
    4: {MIB: 3.0, 16 * MIB: 1.2, 64 * MIB: 1.15},
}

# ranks -> size -> most microseconds of a call of samestep, back to back
MICROSECONDS: Mapping[int, Mapping[int, float]] = {2: {8: 0.45}}

P99_UP_TO = 4 * KIB  # single calls: p99 at most mpi4py's
HALF_OVER_FLOAT = 0.7  # bfloat16, `shared`, over float32 of as many elements
OTHER_VERBS = {"samestep": 1.3, "shared": 2.5}  # times faster than mpi4py, 1 to 64 MiB
MOVING_VERBS = ("bcast", "allgather", "reduce_scatter", "alltoall", "sendrecv")
SYNCHRONIZE_OVER_BCASTS = 0.2  # 200 arrays of 10 kB


@dataclass(frozen=True)
class Verdict:
    """A goal and what was found.

    Attributes:
      name: of the goal.
      found: None: not measured.
      goal: what must be reached.
      at_least: whether more is better; else less is.
      unit: of both.
      disturbed: no undisturbed round stands behind it.
      possible: what the `limit` of the memory has in ours's place; None: not measured.
    """

    name: str
    found: float | None
    goal: float
    at_least: bool
    unit: str = "x"
    disturbed: bool = False
    possible: float | None = None

    @property
    def reached(self) -> bool | None:
        """Whether it is; None: not measured."""
        if self.found is None:
            return None
        return self.found >= self.goal if self.at_least else self.found <= self.goal

    @property
    def out_of_reach(self) -> bool:
        """Missed, and the memory of this machine does not allow it beside this rival."""
        return self.reached is False and self.possible is not None and self.possible < self.goal

    def __str__(self) -> str:
        mark = {True: "reached", False: "MISSED", None: "not measured"}[self.reached]
        found = "-" if self.found is None else f"{self.found:.3g}"
        sign = ">=" if self.at_least else "<="
        note = "  DISTURBED" if self.disturbed else ""
        if self.out_of_reach:
            note += f"  (the memory allows {self.possible:.3g})"
        return f"{mark:<13}{self.name:<68}{found:>8} {self.unit:<3} {sign} {self.goal:g}{note}"


def judge(result: Result) -> list[Verdict]:
    """Every goal for the result's number of ranks. Pure."""
    return [verdict for goals in (_faster, _bounds, _tails, _moving, _whole) for verdict in goals(result)]


def _faster(result: Result) -> Iterator[Verdict]:
    for (ours, rival, mode), by_ranks in FASTER.items():
        for nbytes, goal in by_ranks.get(result.ranks, {}).items():
            cell = Cell("allreduce", "float32", nbytes, mode)
            yield _ratio(result, cell, f"{ours}: times faster than {rival}", (rival, ours), goal)


def _bounds(result: Result) -> Iterator[Verdict]:
    for nbytes, goal in OVER_LIMIT.get(result.ranks, {}).items():
        cell = Cell("allreduce", "float32", nbytes, "single")
        yield _ratio(result, cell, "shared over limit", ("shared", LIMIT), goal, at_least=False)
    for nbytes, goal in MICROSECONDS.get(result.ranks, {}).items():
        cell = Cell("allreduce", "float32", nbytes, "b2b")
        yield _verdict(result, cell, "samestep", lambda p: p.summaries["samestep"].median_us, goal, unit="us")
    for nbytes in (512 * KIB, 8 * MIB, 32 * MIB):
        cell = Cell("allreduce", "bfloat16", nbytes, "single")
        pair = ("shared", AS_FLOAT32)
        yield _ratio(result, cell, "shared over as many float32", pair, HALF_OVER_FLOAT, at_least=False)


def _tails(result: Result) -> Iterator[Verdict]:
    sizes = sorted({p.cell.nbytes for p in result.points if p.cell.verb == "allreduce"})
    for ours in results.OURS:
        for nbytes in [nbytes for nbytes in sizes if nbytes <= P99_UP_TO]:
            cell = Cell("allreduce", "float32", nbytes, "single")
            yield _verdict(result, cell, f"{ours}: p99 over mpi4py's", _tail(ours), 1.0)


def _tail(ours: str) -> Callable[[Point], float]:
    return lambda point: point.summaries[ours].p99_us / point.summaries["mpi4py"].p99_us


def _moving(result: Result) -> Iterator[Verdict]:
    for ours, goal in OTHER_VERBS.items():
        for verb in MOVING_VERBS:
            for nbytes in (MIB, 16 * MIB, 64 * MIB):
                cell = Cell(verb, "float32", nbytes, "single")
                yield _ratio(result, cell, f"{ours}: times faster than mpi4py", ("mpi4py", ours), goal)
    cell = Cell("synchronize", "float32", 2_000_000, "single")
    pair = ("samestep", "mpi4py")
    yield _ratio(result, cell, "samestep over 200 Bcast", pair, SYNCHRONIZE_OVER_BCASTS, at_least=False)


def _whole(result: Result) -> Iterator[Verdict]:
    lost = results.lost_cells(result.points)
    found = float(len(lost)) if result.points else None
    disturbed = any(point.disturbed for point, _, _ in lost)
    yield Verdict("cells slower than mpi4py or gloo", found, 0, False, "", disturbed)
    imported = result.import_ms
    added = imported["added"] if imported else None
    busy = bool(imported) and result.import_ms["others"] > 0.1  # type: ignore[index]
    yield Verdict("import samestep, beyond import numpy", added, IMPORT_MS, False, "ms", busy)


def _ratio(
    result: Result, cell: Cell, what: str, pair: tuple[str, str], goal: float, *, at_least: bool = True
) -> Verdict:
    """Of the medians of a pair of contenders: the first over the second."""

    def quotient(point: Point) -> float:
        return point.summaries[pair[0]].median_us / point.summaries[pair[1]].median_us

    verdict = _verdict(result, cell, what, quotient, goal, at_least=at_least)
    point = result.find(cell)
    if at_least and point and {pair[0], LIMIT} <= point.summaries.keys():
        allowed = point.summaries[pair[0]].median_us / point.summaries[LIMIT].median_us
        verdict = replace(verdict, possible=allowed)
    return verdict


def _verdict(
    result: Result,
    cell: Cell,
    what: str,
    value: Callable[[Point], float],
    goal: float,
    *,
    at_least: bool = False,
    unit: str = "x",
) -> Verdict:
    point, found = result.find(cell), None
    if point:
        try:
            found = value(point)
        except KeyError:  # a contender did not take part
            found = None
    return Verdict(f"{cell}, {what}", found, goal, at_least, unit, bool(point and point.disturbed))


def table(result: Result) -> list[str]:
    """The verdicts as lines, and the losing cells below."""
    verdicts = judge(result)
    counts = [sum(v.reached is kind for v in verdicts) for kind in (True, False, None)]
    lines = [
        f"{result.ranks} ranks, {result.mpi}, {result.machine['utc']} UTC, commit {result.machine['commit']}:"
        f" {counts[0]} reached, {counts[1]} missed ({sum(v.out_of_reach for v in verdicts)} of them more than the"
        f" memory allows), {counts[2]} not measured"
    ]
    if result.ranks not in RANKS:
        lines.append(f"(there are goals for {' and '.join(map(str, RANKS))} ranks; those for any are below)")
    lines += [str(verdict) for verdict in verdicts]
    for point, ours, rival in results.lost_cells(result.points):
        ratio = results.times_faster(point, ours, rival)
        note = "  DISTURBED" if point.disturbed else ""
        lines.append(f"  slower: {point.cell}, {ours} {ratio:.2f} times as fast as {rival}{note}")
    return lines


def missed(result: Result) -> list[str]:
    """Names of the goals that were measured and missed."""
    return [verdict.name for verdict in judge(result) if verdict.reached is False]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the verdicts; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--require", action="store_true", help="exit with 1 if a goal is missed")
    flags = parser.parse_args(argv)
    found = [results.load(path) for path in flags.results]
    print("\n\n".join("\n".join(table(result)) for result in found))
    return int(flags.require and any(missed(result) for result in found))


if __name__ == "__main__":
    sys.exit(main())

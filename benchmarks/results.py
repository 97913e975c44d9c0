"""What a run found, and how it is kept: plain data that needs neither MPI nor NumPy to be read."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 2

OURS = ("samestep", "shared")
"""Contenders that are this package: on non-shared arrays, and on arrays of `backend.empty`."""

RIVALS = ("mpi4py", "gloo")
LIMIT = "limit"

AS_FLOAT32 = "shared_float32"
"""In cells of a half type: `shared` with as many elements of float32, which takes turns with the others."""

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Cell:
    """What is measured: one verb at one size.

    Attributes:
      verb: one of `problems.VERBS`.
      dtype: of the elements.
      nbytes: of the array each rank passes in.
      mode: "single": each call after a barrier; "b2b": back to back, many calls in a row.
    """

    verb: str
    dtype: str
    nbytes: int
    mode: str

    def __str__(self) -> str:
        kind = "" if self.dtype == "float32" else f" {self.dtype}"
        mode = " back to back" if self.mode == "b2b" else ""
        return f"{self.verb}{kind}{' ' + size(self.nbytes) if self.nbytes else ''}{mode}"


@dataclass(frozen=True)
class Summary:
    """What one contender needed for one cell, in microseconds per call, over the rounds that were kept.

    Attributes:
      statement: the line that was timed.
      median_us, p99_us, min_us: of all measurements.
      rounds_us: the median of each round; their spread says how far to trust the figure.
      measurements, calls_in_a_row: how many times the clock was read, and after how many calls.
    """

    statement: str
    median_us: float
    p99_us: float
    min_us: float
    rounds_us: list[float]
    measurements: int
    calls_in_a_row: int


@dataclass(frozen=True)
class Point:
    """One cell with the figures of all contenders, which alternated.

    Attributes:
      cell: what was measured.
      summaries: by contender.
      rounds: how many rounds the figures come from.
      left_out: how many were made besides and left out, because other processes disturbed them.
      others: cores that other processes used during the rounds kept, on average.
      disturbed: no round was undisturbed, so that all were kept, or those kept are disturbed taken together; the
        figures should not be quoted.
      seconds: the duration of all of it.
    """

    cell: Cell
    summaries: dict[str, Summary]
    rounds: int
    left_out: int
    others: float
    disturbed: bool
    seconds: float


@dataclass(frozen=True)
class Result:
    """One run of `collectives.py`.

    Attributes:
      machine: facts of `machine.facts`.
      ranks: their number.
      command: what was typed.
      settings: rounds, seconds, calls in a row.
      contenders: by name; what others are compared with comes first.
      points: what was found.
      absent: what was asked for and not measured: what, and why.
      import_ms: fields of `import_time.ImportTime`; None if not measured.
    """

    machine: dict[str, Any]
    ranks: int
    command: str
    settings: dict[str, Any]
    contenders: list[str]
    points: list[Point]
    absent: dict[str, str] = field(default_factory=dict)
    import_ms: dict[str, Any] | None = None

    def find(self, cell: Cell) -> Point | None:
        """The point of a cell, if it was measured."""
        return next((point for point in self.points if point.cell == cell), None)

    @property
    def mpi(self) -> str:
        """The MPI library below mpi4py, with its version."""
        return f"{self.machine['mpi']['name']} {self.machine['mpi']['version']}"


def save(result: Result, path: Path) -> None:
    """Writes one run as JSON: a line for each point, numbers with five digits."""
    points = ",\n  ".join(json.dumps(_rounded(asdict(point))) for point in result.points)
    facts = _rounded(asdict(dataclasses.replace(result, points=[])))
    del facts["points"]
    head = json.dumps({"schema": SCHEMA, **facts}, indent=1).removesuffix("\n}")
    path.write_text(f'{head},\n "points": [\n  {points}\n ]\n}}\n')


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(found) for name, found in value.items()}
    return [_rounded(found) for found in value] if isinstance(value, list) else value


def load(path: Path) -> Result:
    """Reads what `save` wrote.

    Raises:
      ValueError: the file is no such result.
    """
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
        raise ValueError(f"{path}: no result of this version of collectives.py (schema {SCHEMA})")
    points = [
        Point(
            **{
                **point,
                "cell": Cell(**point["cell"]),
                "summaries": {name: Summary(**found) for name, found in point["summaries"].items()},
            }
        )
        for point in found["points"]
    ]
    return Result(**{**found, "points": points})


def times_faster(point: Point, ours: str, theirs: str) -> float | None:
    """Median time of `theirs` over that of `ours`, in one run; None where either was not measured."""
    if ours not in point.summaries or theirs not in point.summaries:
        return None
    return point.summaries[theirs].median_us / point.summaries[ours].median_us


def spread(point: Point, ours: str, theirs: str) -> tuple[float, float] | None:
    """The smallest and the largest `times_faster` of a single round."""
    if ours not in point.summaries or theirs not in point.summaries:
        return None
    pairs = zip(point.summaries[theirs].rounds_us, point.summaries[ours].rounds_us, strict=True)
    ratios = [their_time / our_time for their_time, our_time in pairs]
    return min(ratios), max(ratios)


def lost_cells(points: Iterable[Point]) -> list[tuple[Point, str, str]]:
    """Cells in which one of ours takes longer than a rival: (point, ours, rival)."""
    return [
        (point, ours, rival)
        for point in points
        for ours in OURS
        for rival in RIVALS
        if (ratio := times_faster(point, ours, rival)) is not None and ratio < 1
    ]


def left_out(points: Sequence[Point]) -> tuple[int, int]:
    """(rounds left out as disturbed, all rounds made)."""
    out = sum(point.left_out for point in points)
    return out, out + sum(point.rounds for point in points)


def size(nbytes: int) -> str:
    """Bytes for people, exact.

    Example:
      >>> size(8), size(65536), size(1 << 20), size(2_000_000)
      ('8 B', '64 KiB', '1 MiB', '2000000 B')
    """
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def sizes_of(text: str) -> list[int]:
    """Sizes in bytes.

    Example:
      >>> sizes_of("8,4KiB,1MiB")
      [8, 4096, 1048576]
    """
    sizes = []
    for word in text.split(","):
        number, factor = word.strip(), 1
        for suffix, scale in (("KiB", KIB), ("MiB", MIB), ("B", 1)):
            if number.endswith(suffix):
                number, factor = number[: -len(suffix)], scale
                break
        if not number.isdecimal() or int(number) * factor < 4:
            raise argparse.ArgumentTypeError(f"{word!r}: sizes are like 8, 64KiB, 1MiB, at least 4")
        sizes.append(int(number) * factor)
    return sizes


def microseconds(value: float) -> str:
    """Three digits, never an exponent.

    Example:
      >>> microseconds(0.4237), microseconds(48.26), microseconds(44503.2)
      ('0.424', '48.3', '44503')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"

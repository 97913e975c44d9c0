"""What samestep must reach beside mpi4py; checked by `--require`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import import_time
from harness import DISTURBED, Point
from import_time import ImportTime

M = TypeVar("M", Point, ImportTime)

RANKS = 2
"""The goals are for this many ranks."""

ATTEMPTS = 3
"""How often a disturbed measurement is made before it is judged anyhow."""


@dataclass(frozen=True)
class Goal:
    """`samestep` may take at most `limit` times as long as `mpi4py`."""

    verb: str
    nbytes: int
    mode: str
    limit: float

    def __str__(self) -> str:
        return f"{self.verb} {self.nbytes} B {self.mode}"


GOALS = (
    Goal("allreduce", 8, "b2b", 1.1),
    Goal("allreduce", 2**20, "single", 1.05),
    Goal("allreduce", 2**20, "b2b", 1.05),
    Goal("synchronize", 2_000_000, "single", 0.2),
)


@dataclass(frozen=True)
class Verdict:
    """A goal and what was found.

    Attributes:
      name: of the goal.
      found, limit: in `unit`.
      unit: "x mpi4py" or "ms".
      others: cores that other processes used during the measurement judged.
    """

    name: str
    found: float
    limit: float
    unit: str
    others: float

    @property
    def reached(self) -> bool:
        """Whether what was found is within the limit."""
        return self.found <= self.limit

    def __str__(self) -> str:
        mark = "reached" if self.reached else "MISSED "
        text = f"{mark}  {self.name}: {self.found:.3g} {self.unit}, at most {self.limit:g}"
        if self.others > DISTURBED:
            text += f"  (DISTURBED {ATTEMPTS} times: others used {self.others:.2f} cores; repeat when it is quiet)"
        return text


def judge(points: Sequence[Point], imported: ImportTime) -> list[Verdict]:
    """All goals. Each must be among `points`."""
    verdicts = []
    for goal in GOALS:
        point = next(p for p in points if (p.verb, p.nbytes, p.mode) == (goal.verb, goal.nbytes, goal.mode))
        ratio = point.summaries["samestep"].median_us / point.summaries["mpi4py"].median_us
        verdicts.append(Verdict(str(goal), ratio, goal.limit, "x mpi4py", point.others))
    verdicts.append(
        Verdict(
            "import samestep", imported.added, import_time.LIMIT_MS, "ms on top of numpy", imported.others
        )
    )
    return verdicts


def undisturbed(measure: Callable[[], M]) -> M:
    """The first undisturbed of up to `ATTEMPTS` measurements, else the least disturbed."""
    made = [measure()]
    while made[-1].others > DISTURBED and len(made) < ATTEMPTS:
        made.append(measure())
    return min(made, key=lambda measured: measured.others)

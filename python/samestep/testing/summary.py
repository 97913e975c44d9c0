"""What ran where: counted during the run, printed at the end, and compared with the expected numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from _pytest.terminal import TerminalReporter

from samestep.testing import markers
from samestep.testing.markers import World


class Tally:
    """Counts of the tests that ran on every rank of their world."""

    def __init__(self) -> None:
        self.ran: Counter[World] = Counter()
        self.left_out: Counter[str] = Counter()
        self.places: set[str] = set()
        self.n_launches = 0

    def count(self, world: World, by_rank: Mapping[int, Sequence[pytest.TestReport]], place: str) -> None:
        """Count a test unless it was skipped: then no rank has a report of an unskipped call."""
        calls = [r for reports in by_rank.values() for r in reports if r.when == "call"]
        if any(not r.skipped or hasattr(r, "wasxfail") for r in calls):
            self.ran[world] += 1
        if place:
            self.places.add(place)

    def ran_at(self, size: int) -> int:
        """Number of tests that ran on `size` ranks."""
        return sum(n for world, n in self.ran.items() if world.size == size)

    def lines(self) -> list[str]:
        """Like "74 tests: 30 on 1 rank (16 mpi, 14 self), 44 on 2 (mpi); Open MPI 5.0.11, one host"."""
        lines = []
        if self.ran:
            sizes = sorted({world.size for world in self.ran})
            counts = ", ".join(self._size_line(size, first=size == sizes[0]) for size in sizes)
            where = "".join(f"; {place}" for place in sorted(self.places))
            launches = f"; {_counted(self.n_launches, 'launch', 'launches')}" if self.n_launches else ""
            tests = _counted(sum(self.ran.values()), "test", "tests")
            lines.append(f"{tests}: {counts}{where}{launches}")
        if self.left_out:
            counts = ", ".join(f"{n} {why}" for why, n in sorted(self.left_out.items()))
            lines.append(f"not run here: {counts}")
        return lines

    def _size_line(self, size: int, *, first: bool) -> str:
        parts = sorted((w.backend or "no group", n) for w, n in self.ran.items() if w.size == size)
        names = parts[0][0] if len(parts) == 1 else ", ".join(f"{n} {name}" for name, n in parts)
        unit = ("" if not first else " rank") if size == 1 else (" ranks" if first else "")
        return f"{self.ran_at(size)} on {size}{unit} ({names})"


TALLY: pytest.StashKey[Tally] = pytest.StashKey()


def _counted(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def is_whole_run(config: pytest.Config) -> bool:
    """Whether everything was asked for: no path, name, mark or earlier failure narrows the run."""
    narrowing = "keyword markexpr deselect lf stepwise collectonly maxfail setuponly setupplan"
    if any(config.getoption(name, None) for name in narrowing.split()):
        return False
    source = pytest.Config.ArgsSource
    if config.args_source == source.INVOCATION_DIR:
        return config.invocation_params.dir == config.rootpath
    return config.args_source == source.TESTPATHS or sorted(config.args) == sorted(config.getini("testpaths"))


def shortages(config: pytest.Config, tally: Tally, only_size: int | None) -> list[str]:
    """One line per broken promise of the ini option; empty for a run that was narrowed on purpose.

    Args:
      only_size: the one number of ranks this run has, under mpirun; None where it starts its own.
    """
    if not is_whole_run(config):
        return []
    return [
        f"{markers.EXPECTED_INI} promises {count} tests on {size} ranks, but {tally.ran_at(size)} ran"
        for size, count in sorted(markers.expected(config).items())
        if only_size in (None, size) and tally.ran_at(size) < count
    ]


def write(reporter: TerminalReporter, tally: Tally, broken_promises: Sequence[str]) -> None:
    """Write the section "ranks" of the terminal summary."""
    lines = tally.lines()
    if not lines and not broken_promises:
        return
    reporter.write_sep("=", "ranks")
    for line in lines:
        reporter.write_line(line)
    for line in broken_promises:
        reporter.write_line(f"ERROR: {line}", red=True)

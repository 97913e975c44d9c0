"""Merges the reports of all ranks about one test, the rank that failed first first, and counts what ran where.

The counts are printed at the end, and compared with the expected numbers.
"""

from __future__ import annotations

import io
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest._io import TerminalWriter
from _pytest.terminal import TerminalReporter

from samestep.testing import markers
from samestep.testing.markers import World

PHASES = ("setup", "call", "teardown")
CONSEQUENCES = ("samestep.PeerLostError", "samestep.TimeoutError")


class RanksRepr(TerminalRepr):
    """The failure texts of several ranks, each line with its rank in front, root cause first."""

    def __init__(self, headline: str, texts: Sequence[tuple[int, Any]]) -> None:
        self.headline = headline
        self.texts = texts
        text = texts[0][1]  # pytest's short summary reads the next attribute
        self.reprcrash = getattr(text, "reprcrash", None) or ReprFileLocation("", 0, str(text).split("\n")[0])

    def toterminal(self, tw: TerminalWriter) -> None:
        """Write it; equal texts of several ranks are written once."""
        tw.line(self.headline, red=True, bold=True)
        shown: dict[str, int] = {}
        for rank, text in self.texts:
            lines = _render(text, tw)
            same = re.sub("0x[0-9a-f]+", "0x", "\n".join(lines))
            if same in shown:
                tw.line(f"[{rank}] the same as rank {shown[same]}")
                continue
            shown[same] = rank
            for line in lines:
                tw.line(f"[{rank}] {line}".rstrip())


def _render(text: Any, tw: TerminalWriter) -> list[str]:
    out = io.StringIO()
    inner = TerminalWriter(out)
    inner.hasmarkup = tw.hasmarkup
    inner.fullwidth = max(40, tw.fullwidth - 4)
    if hasattr(text, "toterminal"):
        text.toterminal(inner)
    else:
        inner.line(str(text))
    return out.getvalue().rstrip("\n").split("\n")


def failure(
    item: pytest.Item, text: str, *, when: Any = "call", consequence: bool = False
) -> pytest.TestReport:
    """A failed report for a rank that could not write its own: it died, or hung."""
    now = time.time()
    report = pytest.TestReport(
        item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", text, when, start=now, stop=now
    )
    report.consequence = consequence  # type: ignore[attr-defined]
    return report


def merge(by_rank: Mapping[int, Sequence[pytest.TestReport]]) -> list[pytest.TestReport]:
    """One report per phase that any rank went through.

    A phase failed if it failed on any rank. A rank that skips a test which others run is a failure, too,
    because nobody would notice it otherwise.
    """
    merged = []
    for phase in PHASES:
        reports = {rank: r for rank, rs in sorted(by_rank.items()) for r in rs if r.when == phase}
        if reports:
            merged.append(_merge_phase(reports))
    return merged


def _merge_phase(reports: dict[int, pytest.TestReport]) -> pytest.TestReport:
    failed = {rank: r for rank, r in reports.items() if r.failed}
    skipped = {rank: r for rank, r in reports.items() if r.skipped}
    expected = {rank: r for rank, r in reports.items() if hasattr(r, "wasxfail")}
    speaker = next(iter((failed or expected or skipped or reports).values()))
    merged = pytest.TestReport(
        speaker.nodeid,
        speaker.location,
        speaker.keywords,
        speaker.outcome,
        speaker.longrepr,
        speaker.when,
        sections=_sections(reports),
        duration=max(r.duration for r in reports.values()),
        start=min(r.start for r in reports.values()),
        stop=max(r.stop for r in reports.values()),
        user_properties=next(iter(reports.values())).user_properties,
    )
    if len(reports) == 1:
        pass
    elif failed:
        merged.longrepr = _tell(failed, len(reports))
    elif skipped and not expected and len(skipped) < len(reports):
        others = sorted(set(reports) - set(skipped))
        merged.outcome = "failed"
        merged.longrepr = f"skipped on ranks {sorted(skipped)} but not on {others}: {_reason(speaker)}"
    if expected and not failed:
        merged.wasxfail = next(iter(expected.values())).wasxfail
    return merged


def _tell(failed: dict[int, pytest.TestReport], n_ranks: int) -> RanksRepr:
    order = sorted(failed, key=lambda rank: (is_consequence(failed[rank]), failed[rank].stop))
    first, others = order[0], order[1:]
    also = f"; then {_ranks(others)}" if others else ""
    headline = f"{_ranks([first])} of {n_ranks} failed first{also}"
    return RanksRepr(headline, [(rank, failed[rank].longrepr) for rank in order])


def is_consequence(report: pytest.TestReport) -> bool:
    """Whether a failure only reports that another rank was missing, which is then the root cause."""
    if hasattr(report, "consequence"):
        return bool(report.consequence)
    message = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
    return str(message).startswith(CONSEQUENCES)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _reason(report: pytest.TestReport) -> str:
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _sections(reports: dict[int, pytest.TestReport]) -> list[tuple[str, str]]:
    if len(reports) == 1:
        return [tuple(s) for r in reports.values() for s in r.sections]  # type: ignore[misc]
    return [(f"{title}, rank {rank}", text) for rank, r in reports.items() for title, text in r.sections]


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

    `only_size` is the one number of ranks that this run has, under mpirun; None where it starts its own.
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

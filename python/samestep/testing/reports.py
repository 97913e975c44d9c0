"""Merges the reports of all ranks about one test; the rank that failed first comes first."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest._io import TerminalWriter

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

"""What the suite says of itself: every minute how far it is, and at the end what was left out and why."""

import re
import time
from collections import Counter

import pytest

EVERY_S = 60.0
PASSED = "samestep/passed"  # in pytest's cache: the tests that passed in a run of `pytest` without arguments
MISSING = re.compile(r"could not import '(\w+)|\bneeds ([a-z_]\w+)$")


def leave_out_passed(config, items):
    """Removes what passed in the last run of `pytest` without arguments, in whatever environment."""
    passed = set(config.cache.get(PASSED, []))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


class SuiteReport:
    """Writes to the terminal of the process that the user started.

    Attributes:
      n_left_out: tests that only `--all` runs.
      left_behind: files in the temporary folder at the end, which fail the run.
    """

    def __init__(self, config):
        self._config = config
        self._start = self._last_line = time.monotonic()
        self._total = self._done = self._failed = self.n_left_out = 0
        self.left_behind = []
        self._passed = []
        self._missing = Counter()
        self._skipped = Counter()

    def pytest_collection_finish(self, session):
        self._total = len(session.items)

    def pytest_collectreport(self, report):
        if report.skipped:
            self._count_skip(report)

    def pytest_runtest_logreport(self, report):
        self._failed += report.failed
        if report.when == "call" and report.passed:
            self._passed.append(report.nodeid)
        if report.skipped and not hasattr(report, "wasxfail"):
            self._count_skip(report)

    def pytest_sessionfinish(self):
        if not self._config.invocation_params.args and hasattr(self._config, "cache"):
            self._config.cache.set(PASSED, self._passed)

    def _count_skip(self, report):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if found := MISSING.search(reason):
            self._missing[found[1] or found[2]] += 1
        else:
            self._skipped[reason.removeprefix("Skipped: ")] += 1

    def pytest_runtest_logfinish(self):
        self._done += 1
        now = time.monotonic()
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and now - self._last_line >= EVERY_S:
            self._last_line = now
            reporter.ensure_newline()
            reporter.write_line(f"{(now - self._start) / 60:.0f} min: {self.progress()}")

    def progress(self):
        """Like "120 of 480 tests (25 %), none failed"."""
        share = 100 * self._done // max(1, self._total)
        return f"{self._done} of {self._total} tests ({share} %), {self._failed or 'none'} failed"

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter):
        for line in self.closing():
            terminalreporter.write_line(line)

    def closing(self):
        """What was left out, a line for each cause."""
        if self.left_behind:
            yield f"FAILED: tests have left temporary files: {', '.join(self.left_behind)}"
        if self.n_left_out:
            yield f"left out: {self.n_left_out} tests that are slow or repeat others; `pytest --all` runs them, too"
        if self._missing:
            each = ", ".join(f"{n} for want of {name}" for name, n in sorted(self._missing.items()))
            yield f"skipped: {each} (a file that cannot be imported counts as one)"
        for reason, n in self._skipped.most_common():
            yield f"skipped: {n}: {reason}"

"""What the suite says of itself while it runs and at its end."""

from types import SimpleNamespace

import pytest
import suite_report


class Reporter:
    def __init__(self):
        self.lines = []

    def ensure_newline(self):
        pass

    def write_line(self, line):
        self.lines.append(line)


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(suite_report.time, "monotonic", lambda: now.s)
    return now


def made(n_tests):
    reporter = Reporter()
    plugins = SimpleNamespace(get_plugin={"terminalreporter": reporter}.get)
    report = suite_report.SuiteReport(SimpleNamespace(pluginmanager=plugins))
    report.pytest_collection_finish(SimpleNamespace(items=[None] * n_tests))
    return report, reporter


def skipped(reason):
    return SimpleNamespace(
        failed=False,
        skipped=True,
        when="call",
        passed=False,
        longrepr=("test_it.py", 1, f"Skipped: {reason}"),
    )


def test_a_line_per_minute_says_how_far_it_is(clock):
    report, reporter = made(8)
    for seconds, failed in ((30, False), (29, True), (1, False), (59, False), (70, False)):
        clock.s += seconds
        report.pytest_runtest_logreport(
            SimpleNamespace(failed=failed, skipped=False, when="call", passed=not failed, nodeid="a")
        )
        report.pytest_runtest_logfinish()
    assert reporter.lines == [
        "1 min: 3 of 8 tests (37 %), 1 failed",
        "3 min: 5 of 8 tests (62 %), 1 failed",
    ]


def test_the_end_says_what_was_left_out_and_for_which_library():
    report, reporter = made(9)
    report.n_left_out = 4500
    report.pytest_collectreport(skipped("could not import 'torch': No module named 'torch'"))
    for reason in (
        "could not import 'jax.numpy': No module named 'jax'",
        "could not import 'torch': No module named 'torch'",
        "digits_torch.py needs torch",
        "takes two ranks",
    ):
        report.pytest_runtest_logreport(skipped(reason))
    report.pytest_terminal_summary(reporter)
    assert reporter.lines == [
        "left out: 4500 tests that are slow or repeat others; `pytest --all` runs them, too",
        "skipped: 1 for want of jax, 3 for want of torch (a file that cannot be imported counts as one)",
        "skipped: 1: takes two ranks",
    ]


def test_a_whole_run_without_skips_says_nothing():
    report, reporter = made(1)
    report.pytest_terminal_summary(reporter)
    assert reporter.lines == []


class Cache(dict):
    set = dict.__setitem__


def run_of(cache, arguments, passed, skipped_ids=()):
    """A run in which some tests passed."""
    config = SimpleNamespace(invocation_params=SimpleNamespace(args=arguments), cache=cache)
    report = suite_report.SuiteReport(config)
    for nodeid in passed:
        for when in ("setup", "call", "teardown"):
            outcome = SimpleNamespace(failed=False, skipped=False, passed=True, when=when, nodeid=nodeid)
            report.pytest_runtest_logreport(outcome)
    for nodeid in skipped_ids:
        setup = SimpleNamespace(failed=False, skipped=False, passed=True, when="setup", nodeid=nodeid)
        report.pytest_runtest_logreport(setup)
        report.pytest_runtest_logreport(skipped("needs torch"))
    report.pytest_sessionfinish()


def left(cache, ids):
    deselected = []

    def pytest_deselected(items):
        deselected.extend(items)

    hook = SimpleNamespace(pytest_deselected=pytest_deselected)
    items = [SimpleNamespace(nodeid=nodeid) for nodeid in ids]
    suite_report.leave_out_passed(SimpleNamespace(cache=cache, hook=hook), items)
    assert {x.nodeid for x in items} | {x.nodeid for x in deselected} == set(ids)
    return [x.nodeid for x in items]


def test_what_passed_in_a_whole_run_can_be_left_out():
    cache = Cache()
    assert left(cache, ["a", "b"]) == ["a", "b"]
    run_of(cache, (), ["a", "b"], skipped_ids=["c"])
    assert left(cache, ["a", "b", "c", "d"]) == ["c", "d"]
    run_of(cache, ("--all",), ["c"])
    assert left(cache, ["a", "b", "c", "d"]) == ["c", "d"]

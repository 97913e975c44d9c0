"""Plain `pytest`: the process the user started collects, starts the ranks, and reports for them."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from samestep.testing import markers, protocol, reports
from samestep.testing.launch import Launch, LaunchError
from samestep.testing.markers import Start, default_timeout, start_of, world_of
from samestep.testing.reports import TALLY

CRASH = "Fatal Python error"  # faulthandler's first words
GRACE_S = 10.0  # for the other ranks to end by themselves once one has failed
LEFT_OUT = ("no:terminal", "no:cacheprovider", "no:faulthandler", "no:junitxml")


class ParentPlugin:
    """Runs marked items on ranks, with as few launches as possible; leaves other items to pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="samestep-"))
        self._launch: Launch | None = None
        self._hopeless: dict[tuple[Path, Start], str] = {}
        self._one_by_one: set[Start] = set()  # whose files have to be kept separate

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a marked item on ranks and log what they report."""
        mark = markers.of(item)
        if mark is None:
            self._end()
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._run(item, nextitem, mark):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        _tear_down_here(item, nextitem)
        return True

    def pytest_sessionfinish(self) -> None:
        """End the last launch normally."""
        self._end()

    def pytest_unconfigure(self) -> None:
        """End all ranks, whatever happened."""
        if self._launch is not None:
            self._launch.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(
        self, item: pytest.Item, nextitem: pytest.Item | None, mark: markers.Ranks
    ) -> list[pytest.TestReport]:
        try:
            launch = self._launch_for(item, mark)
        except LaunchError as error:
            return [reports.failure(item, str(error), when="setup")]
        stays = nextitem is not None and not mark.alone and self._fits(nextitem, markers.of(nextitem))
        next_id = nextitem.nodeid if nextitem is not None and stays else None
        by_rank = self._follow(item, next_id, mark, launch)
        if not stays and (problem := self._end()):
            text = f"after the last test of this launch {problem}"
            by_rank[0].append(reports.failure(item, text, when="teardown"))
        return reports.merge(by_rank)

    def _follow(
        self, item: pytest.Item, next_id: str | None, mark: markers.Ranks, launch: Launch
    ) -> dict[int, list[pytest.TestReport]]:
        """The reports of each rank about `item`. Ends the launch if it is no longer usable."""
        if problem := launch.problem(item.nodeid):
            return {0: [reports.failure(item, problem, when="setup")]}
        timeout = mark.timeout or default_timeout(self._config)
        launch.tell(protocol.Run(item.nodeid, next_id, timeout))
        run = _TestCase(item, launch, mark, timeout, self._config)
        run.follow()
        if not run.usable:
            launch.kill()
            self._launch = None
        self._config.stash[TALLY].count(world_of(item), run.by_rank, run.place)
        return run.by_rank

    def _fits(self, item: pytest.Item, mark: markers.Ranks | None) -> bool:
        """Whether `item` can run in the current launch."""
        if mark is None or mark.alone or self._launch is None:
            return False
        return item.path in self._launch.paths and self._launch.start == start_of(item)

    def _launch_for(self, item: pytest.Item, mark: markers.Ranks) -> Launch:
        if self._launch is not None and self._fits(item, mark):
            return self._launch
        self._end()
        start = start_of(item)
        if (item.path, start) in self._hopeless:
            raise LaunchError(self._hopeless[item.path, start])
        paths = self._paths_for(item, mark)
        try:
            self._launch = self._begin(start, paths, tolerant=bool(mark.dies))
        except LaunchError as error:
            if len(paths) == 1:
                self._hopeless[item.path, start] = str(error)
                raise
            self._one_by_one.add(start)  # any of these files may be the one that ends the ranks
            return self._launch_for(item, mark)
        return self._launch

    def _paths_for(self, item: pytest.Item, mark: markers.Ranks) -> list[Path]:
        """The files that a launch for `item` serves: those of all items from here on that can share it."""
        start = start_of(item)
        if mark.alone or start in self._one_by_one:
            return [item.path]
        from_here = itertools.dropwhile(lambda other: other is not item, item.session.items)
        marked = [(other, found) for other in from_here if (found := markers.of(other))]
        shared = [other.path for other, found in marked if not found.alone and start_of(other) == start]
        return list(dict.fromkeys([item.path, *shared]))

    def _begin(self, start: Start, paths: list[Path], *, tolerant: bool) -> Launch:
        tally = self._config.stash[TALLY]
        folder = self._folder / str(tally.n_launches)
        folder.mkdir()
        tally.n_launches += 1
        options = _options_of_ranks(self._config)
        return Launch(start, paths, options=options, folder=folder, tolerant=tolerant)

    def _end(self) -> str:
        """End the ranks normally. Returns the error, or an empty string."""
        launch, self._launch = self._launch, None
        return launch.quit() if launch is not None else ""


class _TestCase:
    """Follows the ranks through one test until all have ended it, died, or run out of time."""

    def __init__(
        self, item: pytest.Item, launch: Launch, mark: markers.Ranks, timeout: float, config: pytest.Config
    ) -> None:
        self._item = item
        self._launch = launch
        self._mark = mark
        self._timeout = timeout
        self._config = config
        self._deadline = time.monotonic() + timeout
        self._pending = dict(launch.connections)
        self._failed_first: int | None = None
        self._dead: list[int] = []
        self.by_rank: dict[int, list[pytest.TestReport]] = {rank: [] for rank in launch.connections}
        self.usable = not mark.dies
        self.place = ""

    def follow(self) -> None:
        """Read reports until the test has ended on every rank."""
        while self._pending and (left := self._deadline - time.monotonic()) > 0:
            for end in wait(list(self._pending.values()), left):
                self._hear(next(rank for rank, c in self._pending.items() if c is end))
        if self._pending:
            self._give_up_on(self._launch.dump(self._pending))
        self._report_dead_ranks()
        for rank in self._mark.dies:
            if self.by_rank[rank] and not any(r.failed for r in self.by_rank[rank]):
                self._add(rank, f"rank {rank} was to die, as dies={set(self._mark.dies)} says, but lives")

    def _hear(self, rank: int) -> None:
        connection: Connection = self._pending[rank]
        try:
            message = connection.recv()
        except (EOFError, OSError):
            self._has_died(rank)
            return
        self.by_rank[rank] += [
            self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
            for data in message.reports
        ]
        if isinstance(message, protocol.Failed):
            self._expect_the_end(rank)
        else:
            del self._pending[rank]
            self.place = self.place or message.place

    def _has_died(self, rank: int) -> None:
        del self._pending[rank]
        self._launch.forget(rank)
        self.usable = False
        if rank in self._mark.dies:
            self.by_rank[rank].clear()
            return
        self._dead.append(rank)
        self._expect_the_end(rank)

    def _report_dead_ranks(self) -> None:
        """A launcher ends all ranks when one dies: the one that crashed, or else the first, is the cause."""
        logs = {rank: self._launch.printed(rank) for rank in self._dead}
        crashed = [rank for rank in self._dead if CRASH in logs[rank]]
        cause = next(iter(crashed or self._dead), None)
        for rank in self._dead:
            launcher = self._launch.last_output() if rank == cause else ""
            consequence = rank != cause or self._failed_first not in self._dead
            text = f"rank {rank} died during the test{logs[rank]}{launcher}"
            self._add(rank, text, consequence=consequence)

    def _give_up_on(self, tracebacks: Mapping[int, str]) -> None:
        self.usable = False
        for rank, text in tracebacks.items():
            if self._failed_first is None:
                why = f"rank {rank} had not ended the test after {self._timeout:g} s"
            else:
                why = f"rank {rank} was still at it {GRACE_S:g} s after rank {self._failed_first} had failed"
            self._add(rank, f"{why}. It was here:\n{text}", consequence=self._failed_first is not None)

    def _add(self, rank: int, text: str, *, consequence: bool = False) -> None:
        self.by_rank[rank].append(reports.failure(self._item, text, consequence=consequence))
        self.usable = False

    def _expect_the_end(self, rank: int) -> None:
        """`rank` has failed: shorten the time of the others."""
        self.usable = False
        if self._failed_first is None:
            self._failed_first = rank
            self._deadline = min(self._deadline, time.monotonic() + GRACE_S)


def _options_of_ranks(config: pytest.Config) -> dict[str, Any]:
    """The user's options, without those that report, select or repeat: that is done here."""
    options = {name: value for name, value in vars(config.option).items() if _is_plain(value)}
    options.pop("file_or_dir", None)
    return options | {
        "plugins": [*config.option.plugins, *LEFT_OUT],
        "rootdir": str(config.rootpath),
        "inifilename": None if config.inipath is None else str(config.inipath),
        "capture": "sys",  # what libraries print past Python is kept in the rank's log, also when it crashes
        "keyword": "",
        "markexpr": "",
        "deselect": None,
        "maxfail": 0,
        "usepdb": False,
        "trace": False,
        "stepwise": False,
        "xmlpath": None,
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def _tear_down_here(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Tear down what unmarked tests before `item` have set up in this process and nobody needs any more."""
    state = item.session._setupstate
    call = pytest.CallInfo.from_call(lambda: state.teardown_exact(nextitem), when="teardown")
    if call.excinfo is not None:
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)

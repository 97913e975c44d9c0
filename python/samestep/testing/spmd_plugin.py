"""`mpirun -n N pytest`: every rank runs its own pytest; a barrier surrounds each test, and all report the same."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol

from samestep.testing import markers, reports
from samestep.testing.markers import HOLDER, default_timeout, world_of
from samestep.testing.reports import TALLY

MEET_S = 120.0  # for all ranks to have collected
SLACK_S = 10.0  # after a test's own deadline, for a late rank to write where it is
TELL_S = 20.0  # for rank 0 to print the summary before it ends the job
POLL_S = 0.0005


class SpmdPlugin:
    """Runs the items meant for this number of ranks; all ranks log the same merged reports.

    Rank 0 prints. The ranks meet over a communicator of their own, which no test can break.
    """

    def __init__(self, config: pytest.Config, size: int) -> None:
        from mpi4py import MPI

        from samestep.testing.world import WorldHolder

        self._config = config
        self._late: list[int] = []
        self._comm = MPI.COMM_WORLD.Dup()
        if self._comm.size != size:
            raise pytest.UsageError(
                f"the launcher started {size} ranks, but mpi4py's MPI library sees {self._comm.size}: start "
                "pytest by the mpirun that belongs to that library, or use plain pytest"
            )
        self._stderr = os.fdopen(os.dup(2), "w", buffering=1)
        config.stash[HOLDER] = WorldHolder(default_timeout(config) / 2)

    def pytest_configure(self, config: pytest.Config) -> None:
        """Silence all ranks but 0."""
        if self._comm.rank != 0 and (reporter := config.pluginmanager.get_plugin("terminalreporter")):
            config.pluginmanager.unregister(reporter)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect items for other numbers of ranks."""
        reasons = {item: self._why_not(item) for item in items}
        left_out = [item for item in items if reasons[item]]
        items[:] = [item for item in items if not reasons[item]]
        config.hook.pytest_deselected(items=left_out)
        config.stash[TALLY].left_out.update(reasons[item] for item in left_out)

    def _why_not(self, item: pytest.Item) -> str:
        """Why `item` is not run here, or an empty string."""
        mark = markers.of(item)
        if mark is None:
            return "for one process alone"
        if mark.alone:
            return "that need a launch of their own (run plain pytest)"
        return "" if world_of(item).size == self._comm.size else "for other numbers of ranks"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Refuse to begin unless all ranks have collected the same tests."""
        mine = (session.testsfailed, [item.nodeid for item in session.items])
        found = self._exchange(mine, MEET_S, "to collect")
        if any(failed for failed, _ in found) and not session.testsfailed:
            raise session.Interrupted("errors during collection on other ranks")
        if any(ids != mine[1] for _, ids in found):
            raise session.Interrupted(f"ranks collected different tests: {[len(ids) for _, ids in found]}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run an item together with all ranks and log the merged reports."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            by_rank = self._run(item, nextitem)
            self._config.stash[TALLY].count(world_of(item), by_rank, self._config.stash[HOLDER].place)
            merged = reports.merge(by_rank)
        except _RankTimeoutError as error:
            merged = [reports.failure(item, str(error))]
            item.session.shouldfail = str(error)
        for report in merged:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> dict[int, list[pytest.TestReport]]:
        config, holder = self._config, self._config.stash[HOLDER]
        mark = markers.of(item)
        timeout = (mark and mark.timeout) or default_timeout(config)
        self._exchange(None, timeout, f"to begin {item.nodeid}")
        faulthandler.dump_traceback_later(timeout, file=self._stderr)
        mine = runtestprotocol(item, log=False, nextitem=nextitem)
        faulthandler.cancel_dump_traceback_later()
        if any(report.failed for report in mine):
            holder.fail(f"{item.nodeid} failed on this rank")
        serialized = [config.hook.pytest_report_to_serializable(config=config, report=r) for r in mine]
        found = self._exchange(serialized, timeout + SLACK_S, f"to end {item.nodeid}")
        by_rank = {
            rank: [
                config.hook.pytest_report_from_serializable(config=config, data=data) for data in serialized
            ]
            for rank, serialized in enumerate(found)
        }
        if any(report.failed for rs in by_rank.values() for report in rs):
            holder.close()
        return by_rank

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Finalise the world while all ranks are alive."""
        if not self._late:
            self._config.stash[HOLDER].close()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """End a job that cannot end by itself."""
        if self._late:  # MPI_Finalize would wait for them
            sys.stdout.flush()
            self._comm.Abort(1)

    def _exchange(self, mine: object, timeout: float, act: str) -> Sequence[Any]:
        """The values of all ranks, by rank. At the deadline the whole job ends, with an error that names the late
        ranks."""
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        sends = [self._comm.isend(mine, rank) for rank in others]
        found = {self._comm.rank: mine}
        deadline = time.monotonic() + timeout
        while len(found) < self._comm.size:
            for rank in others:
                if rank not in found and (message := self._comm.improbe(rank)) is not None:
                    found[rank] = message.recv()
            if time.monotonic() > deadline:
                self._late = sorted(set(others) - set(found))
                self._give_up(f"rank {self._comm.rank} waited {timeout:g} s for ranks {self._late} {act}")
            time.sleep(POLL_S)
        for send in sends:
            send.wait()
        return [found[rank] for rank in sorted(found)]

    def _give_up(self, reason: str) -> NoReturn:
        """Rank 0, or the first rank that is not late, reports the error and ends the job; the others wait for that."""
        teller = min(set(range(self._comm.size)) - set(self._late))
        if self._comm.rank != teller:
            time.sleep(TELL_S)
        elif teller == 0:
            raise _RankTimeoutError(reason)
        print(f"\nsamestep.testing: {reason}", file=self._stderr)
        self._comm.Abort(1)
        raise AssertionError("MPI_Abort does not return")


class _RankTimeoutError(Exception):
    """Some ranks did not join; the text names them and the step."""

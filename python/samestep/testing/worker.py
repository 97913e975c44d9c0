"""One rank: `python -m samestep.testing.worker SOCKET FOLDER [RANK]`, started by the parent pytest.

Collects the files that the parent names, then runs the requested tests in the requested order.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

from samestep.testing import protocol
from samestep.testing.markers import HOLDER, default_timeout

SELF_DESTRUCT_S = 20.0  # after a test's own deadline: the parent has died or hangs


class RankPlugin:
    """Replaces pytest's loop over the items by the parent's orders."""

    def __init__(self, parent: Connection, log: IO[str], config: pytest.Config) -> None:
        self._parent = parent
        self._log = log
        self._config = config
        self._items: dict[str, pytest.Item] = {}
        self._problems: dict[str, str] = {}
        self._reports: list[dict[str, Any]] = []  # that the parent has not got yet

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the text of a file that cannot be collected."""
        if report.failed:
            self._problems[report.nodeid.partition("::")[0]] = report.longreprtext

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests that the parent requests, until it closes the connection."""
        self._items = {item.nodeid: item for item in session.items}
        self._parent.send(protocol.Ready(self._problems))
        session.testsfailed = 0  # files that cannot be collected: the parent reports them
        while True:
            try:
                order: protocol.Run | None = self._parent.recv()
            except (EOFError, OSError):
                _leave("the pytest process has gone")
            if order is None:
                return True
            self._run(order)

    def _run(self, order: protocol.Run) -> None:
        item = self._items.get(order.nodeid)
        if item is None:
            _leave(f"this rank did not collect {order.nodeid}; has it {len(self._items)} other tests?")
        faulthandler.dump_traceback_later(order.timeout + SELF_DESTRUCT_S, exit=True, file=self._log)
        next_item = self._items.get(order.next_id) if order.next_id else None
        item.ihook.pytest_runtest_protocol(item=item, nextitem=next_item)
        faulthandler.cancel_dump_traceback_later()
        self._parent.send(protocol.Done(self._take_reports(), self._config.stash[HOLDER].place))

    def _take_reports(self) -> list[dict[str, Any]]:
        taken, self._reports = self._reports, []
        return taken

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep each phase for the end of the test; the parent and the peers learn of a failure at once."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(data)
        if report.failed:
            self._parent.send(protocol.Failed(self._take_reports()))
            self._config.stash[HOLDER].fail(f"{report.nodeid} failed on this rank")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Finalise the world while all ranks are alive."""
        self._config.stash[HOLDER].close()


def _leave(reason: str) -> NoReturn:
    print(f"samestep.testing: {reason}", file=sys.__stderr__, flush=True)
    os._exit(1)


def _redirect(path: Path) -> IO[str]:
    """Send what this process and its libraries print, and tracebacks of crashes, to `path`."""
    log = path.open("w", encoding="utf-8", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    return log


def main(socket_path: str, folder: str, given_rank: str = "") -> int:
    """Run one rank until the parent ends it. The rank is an argument unless an MPI launcher has set it."""
    rank = int(given_rank) if given_rank else (protocol.launcher_world() or (0, 1))[0]
    log = _redirect(Path(folder) / f"rank_{rank}.log")
    faulthandler.enable(log, all_threads=True)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    parent = Client(socket_path, "AF_UNIX")
    parent.send(protocol.Hello(rank, os.getpid()))
    setup: protocol.Setup = parent.recv()
    options = setup.options | {"basetemp": str(Path(folder) / f"tmp_{rank}")}
    config = pytest.Config.fromdictargs(options, setup.paths)
    plugin = RankPlugin(parent, log, config)
    config.pluginmanager.register(plugin, "samestep-rank")
    from samestep.testing.world import WorldHolder

    config.stash[HOLDER] = WorldHolder(default_timeout(config) / 2, Path(folder))
    try:
        return int(config.hook.pytest_cmdline_main(config=config))
    finally:
        config._ensure_unconfigure()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

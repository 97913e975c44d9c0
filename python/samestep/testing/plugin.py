"""The hooks and fixtures that pytest loads; see the package `samestep.testing` for what they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from _pytest.terminal import TerminalReporter

from samestep._util import launchers
from samestep.testing import markers, protocol, reports

if TYPE_CHECKING:
    from samestep.backend import Backend

_TOGETHER = "samestep-together"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini options."""
    expected_help = "size:count ...; the run fails if fewer tests than count ran on size ranks"
    parser.addini(markers.EXPECTED_INI, expected_help, "args", [])
    timeout_help = "seconds a test with the mark `ranks` may take; the mark can say else"
    parser.addini(markers.TIMEOUT_INI, timeout_help, default="60")
    backends_help = "backends that the fixture `group` stands for"
    parser.addini(markers.BACKENDS_INI, backends_help, "args", ["self", "native"])


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Only rank 0 of an mpirun writes a report file; decided before the plugin that writes it looks."""
    world = protocol.launcher_world()
    if world is not None and world[0] != 0:
        config.option.xmlpath = None


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Find out what this process is: the parent of ranks, a rank of an mpirun, or a rank of a parent."""
    config.addinivalue_line("markers", markers.MARKER_HELP)
    config.stash[reports.TALLY] = reports.Tally()
    if config.pluginmanager.has_plugin("samestep-rank") or config.getoption("help", False):
        return
    markers.expected(config)
    world = protocol.launcher_world()
    if world is None:
        started_by = launchers.launcher()
        if started_by.name == "samestep" and started_by.size > 1:
            raise pytest.UsageError(
                f"samestep run has started {started_by.size} pytests, each of which would start ranks for its tests. "
                f"Run plain `pytest`; or `samestep run --mpi -n {started_by.size} -m pytest`, for one launch of the "
                "tests of this size"
            )
        from samestep.testing.parent import ParentPlugin

        config.pluginmanager.register(ParentPlugin(config), "samestep-parent")
    else:
        from samestep.testing.spmd_plugin import SpmdPlugin

        config.pluginmanager.register(SpmdPlugin(config, world[1]), _TOGETHER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one item of a marked test for each world it is for."""
    mark = markers.of(metafunc.definition)
    if mark is None:
        return
    names = metafunc.config.getini(markers.BACKENDS_INI)
    jobs = mark.jobs(names, with_group="group" in metafunc.fixturenames)
    if not jobs:
        node, given = metafunc.definition.nodeid, ", ".join(mark.backends or names) or "nothing"
        pytest.fail(
            f"{node}: ranks: no backend for {mark.sizes}: samestep_backends or the mark names {given}",
            pytrace=False,
        )
    metafunc.fixturenames.append(markers.WORLD)
    metafunc.parametrize(markers.WORLD, jobs, indirect=True, ids=str)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the items that share a launch. Items with a launch of their own follow those with the same start.

    Unmarked items come first. Files, and the items of a file on one backend, keep the order they had.
    """
    first_seen: dict[object, int] = {}
    for item in items:
        first_seen.setdefault(item.path, len(first_seen))

    def key(item: pytest.Item) -> tuple[object, ...]:
        mark = markers.of(item)
        if mark is None:
            return (markers.Start(0, mpi=False), False, first_seen[item.path], "")
        start, world = markers.start_of(item), markers.world_of(item)
        return (start, mark.alone, first_seen[item.path], world.backend or "")

    items.sort(key=key)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that ran fewer tests than were promised."""
    fine = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if fine and _shortages(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Say what ran on how many ranks."""
    reports.write(terminalreporter, config.stash[reports.TALLY], _shortages(config))


def _shortages(config: pytest.Config) -> list[str]:
    if config.pluginmanager.has_plugin("samestep-rank"):
        return []
    world = protocol.launcher_world()
    return reports.shortages(config, config.stash[reports.TALLY], world[1] if world else None)


@pytest.fixture(name=markers.WORLD)
def _world(request: pytest.FixtureRequest) -> markers.World:
    if not hasattr(request, "param"):
        name = request.node.name
        pytest.fail(f"{name} runs on no rank: give it a mark like @pytest.mark.ranks(1, 2)", pytrace=False)
    world: markers.World = request.param
    return world


@pytest.fixture
def ranks(_samestep_world: markers.World) -> int:
    """Number of ranks that run this test together."""
    return _samestep_world.size


@pytest.fixture
def group(_samestep_world: markers.World, request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The world of all ranks that run this test: an `ss.Backend` on each backend in turn.

    It is kept from test to test. A test may close it; one that only wants to break a group takes
    `group.split(0)`.
    """
    yield request.config.stash[markers.HOLDER].get(_samestep_world.backend or "")

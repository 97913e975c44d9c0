"""For all tests: what they need of pytest, which of them run by default, and the transports with fake devices."""

import gc
import sys
from pathlib import Path

TESTS = Path(__file__).parent
FAKES = str(TESTS / "fakes")
if FAKES not in sys.path:
    sys.path.append(FAKES)

import fake_worlds  # noqa: E402
import pytest  # noqa: E402
from leftovers import Leftovers  # noqa: E402
from samestep.testing import markers, protocol  # noqa: E402
from suite_report import SuiteReport, leave_out_passed  # noqa: E402

pytest_plugins = ["pytester"]

fake_worlds.register_all()

EXPECTED_OF_ALL = "samestep_ranks_expected_all"
REPORT = "samestep-suite-report"
LEFTOVERS = pytest.StashKey()
MAX_RANKS = 3  # four ranks on two cores mostly wait for their turn
SLOW_FILES = (  # each starts processes for all of its tests, and waits for many of them
    "devices/test_device_distributed",
    "devices/test_device_faults",
    "devices/test_device_lists",
    "devices/test_device_start",
    "devices/test_device_trees",
    "devices/test_gpu_aware.py",
    "devices/test_gpu_kit",
    "faults/test_children",
    "faults/test_group_life_cycle",
    "faults/test_mpi_deaths",
    "faults/test_nested_launchers",
    "faults/test_uncaught_exception",
    "hosts/",
    "interop/test_benchmarks",
    "interop/test_examples",
    "torch_backend/test_torch_ddp",
    "torch_backend/test_torch_launch",
    "torch_backend/test_torch_suite",
    "torch_backend/test_torch_trainers",
)
AS_ON_TWO = (  # what is above the transport: three ranks do nothing that two do not
    "conformance/test_layouts",
    "conformance/test_lists",
    "conformance/test_memory_in_use",
    "conformance/test_pieces",
    "conformance/test_shared_leaves",
    "conformance/test_training_plain_trees",
    "conformance/test_training_synchronize",
    "conformance/test_unknown_leaves",
    "conformance/test_user_calls",
    "fuzz/test_fuzz_calls",
    "interop/test_torch_grad_tensors",
    "interop/test_torch_loops",
    "interop/test_torch_optimizer",
)
OVER_TCP = ("reductions", "movement", "point_to_point", "mismatch", "schedules")  # of tests/conformance


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run everything: also what is slow or repeats itself")
    parser.addoption(
        "--except-passed",
        action="store_true",
        help="leave out what has passed in the last run of a bare `pytest`, perhaps without some libraries",
    )
    parser.addini(EXPECTED_OF_ALL, "as samestep_ranks_expected, for runs with --all", "args", [])


def pytest_configure(config):
    if config.option.all:
        config.stash[markers.EXPECTED_NAME] = EXPECTED_OF_ALL
    config.pluginmanager.register(SuiteReport(config), REPORT)


def pytest_sessionstart(session):
    config = session.config
    if not config.pluginmanager.has_plugin("samestep-rank") and protocol.launcher_world() is None:
        leftovers = config.stash[LEFTOVERS] = Leftovers()
        config.add_cleanup(leftovers.remove)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """After the last ranks have ended."""
    leftovers = session.config.stash.get(LEFTOVERS, None)
    if leftovers is not None and (found := leftovers.found()):
        session.config.pluginmanager.get_plugin(REPORT).left_behind = found
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(config, items):
    if config.option.except_passed and not config.pluginmanager.has_plugin("samestep-rank"):
        leave_out_passed(config, items)
    for item in items:
        if why := fake_worlds.why_left_out(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=why))
    if is_narrowed(config):
        left_out = [item for item in items if is_left_out(item)]
        config.hook.pytest_deselected(items=left_out)
        config.pluginmanager.get_plugin(REPORT).n_left_out = len(left_out)
        items[:] = [item for item in items if not is_left_out(item)]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Its items are no garbage. To look through 20,000 takes 0.6 s, as tests do, and pytest as each process ends."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def is_narrowed(config):
    """Not by `--all`, `-m`, a test's own name or `mpirun -n 4 pytest`; ranks run what their parent says."""
    chosen = config.option.all or config.option.markexpr or any("::" in arg for arg in config.args)
    return (
        not chosen
        and protocol.launcher_world() is None
        and not config.pluginmanager.has_plugin("samestep-rank")
    )


def is_left_out(item):
    """Slow tests; many ranks; what a test does on other transports, or by the other launcher, too."""
    where = item.path.relative_to(TESTS).as_posix()
    if item.get_closest_marker("slow") or where.startswith(SLOW_FILES):
        return True
    values = item.callspec.params if hasattr(item, "callspec") else {}
    world = values.get("_samestep_world")
    if world is None:
        return any(isinstance(value, str) and value == "--mpi" for value in values.values())
    mark = item.get_closest_marker("ranks")
    named = mark.kwargs.get("backends") or ()
    also_on_two, also_on_three = world.size != 2 and 2 in mark.args, world.size != 3 and 3 in mark.args
    again_alone = world.size == 1 and world.backend != "self" and "self" in named
    over_mpi = world.backend == "mpi" and (not named or "native" in named)
    over_tcp = world.backend == "tcp" and not named and item.path.stem.removeprefix("test_") not in OVER_TCP
    # Of three ranks over TCP two do what two alone do. "staged-native" has all numbers of ranks.
    tcp_on_two = world.backend == "tcp" and also_on_three
    otherwise_staged = world.backend in ("staged-default", "staged-direct") and world.size != 2
    staged_over_mpi = world.backend in ("staged", "aware") and also_on_two
    as_on_two = world.size == 3 and also_on_two and where.startswith(AS_ON_TWO)
    again = again_alone or over_mpi or over_tcp or tcp_on_two or as_on_two
    return world.size > MAX_RANKS or again or otherwise_staged or staged_over_mpi

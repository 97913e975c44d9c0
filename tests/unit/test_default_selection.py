"""Which tests of this suite a plain `pytest` leaves out; `--all`, `-m slow` and a test's own name run them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]


def collected(*arguments):
    """Names of the tests that pytest would run."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *arguments]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_what_repeats_itself_is_left_out():
    files = ["tests/conformance/test_groups.py", "tests/conformance/test_movement.py"]
    default, everything = collected(*files), collected("--all", *files)
    assert set(default) < set(everything)

    def world_names(names):
        return {name.partition("[")[2].rstrip("]").split("-")[0] for name in names}

    assert world_names(default) == {"self", "native", "tcp"}
    assert world_names(everything) == {"self", "native", "tcp", "mpi"}
    assert not any("-4" in name for name in default)
    assert any("native-4" in name for name in everything)
    groups = collected(files[0])
    assert world_names(groups) == {"self", "native"}, "TCP is asked for its transport only"


SLOW = "tests/conformance/test_shared_arrays.py"


@pytest.mark.parametrize(
    ("arguments", "there"),
    [
        ([SLOW], False),
        ([SLOW, "--all"], True),
        ([SLOW, "-m", "slow"], True),
        ([f"{SLOW}::test_nothing_is_left_behind"], True),
    ],
    ids=["default", "--all", "-m slow", "its name"],
)
def test_a_slow_test(arguments, there):
    found = [name for name in collected(*arguments) if name.startswith("test_nothing_is_left_behind")]
    assert bool(found) == there

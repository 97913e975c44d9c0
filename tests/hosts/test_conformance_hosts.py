"""The suite that defines a backend, a part of it, over hosts that nothing but a network connects.

The ranks are started by `mpirun`, as `mpirun -n N pytest` is, and what is tested does without MPI.
"""

import sys
from pathlib import Path

import lab as labs
import pytest
from lab import PATIENCE_S

SUITE = Path(__file__).parents[1] / "conformance"
MIXED = ("test_point_to_point.py", "test_groups.py", "test_mismatch.py", "test_schedules.py")


@pytest.fixture
def lab(request):
    if reason := labs.missing():
        pytest.skip(reason)
    pytest.importorskip("mpi4py")
    made = labs.Lab(3)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("hosts", "files"),
    [
        ("node0:1,node1:1", ("test_movement.py",)),
        ("node0:2,node1:2", ("test_reductions.py", "test_work.py")),
        ("node0:1,node1:2,node2:1", MIXED),
    ],
)
def test_a_part_of_the_suite(lab, hosts, files):
    n_hosts, n_ranks = hosts.count("node"), sum(int(part[-1]) for part in hosts.split(","))
    settings = ["-o", "samestep_backends=native", "-o", "samestep_ranks_expected=", "-p", "no:cacheprovider"]
    argv = ["run", "--mpi", "--raw", f"--hosts={hosts}", "-m", "pytest", "-q", *settings]
    files = [str(SUITE / name) for name in files]
    process = lab.start(
        "node0", [sys.executable, "-m", "samestep", *argv, *files, "-k", "not on_one_host"], cwd=SUITE
    )
    text, _ = process.communicate(timeout=3 * PATIENCE_S)
    assert process.returncode == 0, text
    assert f"on {n_ranks} ranks (native)" in text, text
    assert f", {n_hosts} hosts" in text, text

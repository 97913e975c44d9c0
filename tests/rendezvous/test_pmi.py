"""Ranks that meet through PMI-1: under a manager of these tests, and under MPICH's own."""

import json
import shutil
import subprocess
import sys

import pytest
from pmi_manager import Manager, environment
from running import program


def jsons(outputs):
    assert all(out for out, _ in outputs), [err for _, err in outputs]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.parametrize("n", [1, 3])
def test_ranks_meet_without_an_mpi_library_and_again(n):
    command = [sys.executable, *program("rendezvous/pmi", "total", None, 2)]
    manager = Manager(n, command, environment())
    assert manager.wait() == [0] * n
    world = [["native", rank, n, n * (n + 1) / 2, list(range(n))] for rank in range(n)]
    assert jsons(manager.outputs) == [[row, row] for row in world]
    assert not any("SAMESTEP_SECRET" in err for _, err in manager.outputs)  # the ranks have one
    assert manager.finalized == (n if n > 1 else 0)


def test_the_secret_of_the_user_is_not_told_to_the_manager():
    secret = "known to the ranks alone"
    command = [sys.executable, *program("rendezvous/pmi", "total", None, 1)]
    manager = Manager(2, command, environment(SAMESTEP_SECRET=secret))
    assert manager.wait() == [0, 0]
    (value,) = manager.values.values()
    *_, told = json.loads(bytes.fromhex(value))
    assert told == ""


def test_a_manager_that_does_not_answer_is_named_at_the_deadline():
    command = [sys.executable, *program("rendezvous/pmi", "error", 0.5)]
    manager = Manager(2, command, environment(), silent_at="get_my_kvsname")
    manager.wait()
    for name, text in jsons(manager.outputs):
        assert name == "TimeoutError"
        assert "the process manager (PMI_FD): get_my_kvsname: no answer within 0.5 s" in text


def test_what_is_no_manager_is_told():
    done = subprocess.run(
        [sys.executable, *program("rendezvous/pmi", "error", 5)],
        env=environment(PMI_FD="0", PMI_RANK="0", PMI_SIZE="2"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    name, text = json.loads(done.stdout)
    assert name == "UnavailableError" and "PMI_FD=0" in text


@pytest.mark.skipif(not shutil.which("mpiexec.hydra"), reason="needs MPICH's mpiexec.hydra")
def test_ranks_meet_under_hydra():
    command = ["mpiexec.hydra", "-n", "3", sys.executable, *program("rendezvous/pmi", "total", "native", 2)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.replace("]][[", "]]\n[[").splitlines()  # hydra may join those of two ranks
    found = sorted(map(json.loads, lines))
    world = [["native", rank, 3, 6.0, [0, 1, 2]] for rank in range(3)]
    assert found == [[row, row] for row in world]

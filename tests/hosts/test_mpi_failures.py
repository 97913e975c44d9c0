"""What becomes of ranks over MPI whose peers on other hosts die, vanish, stop, come late or never.

`mpirun` is asked to let the others live. A rank that never calls `MPI_Init` is missing here: the others are then inside
their own, which knows no deadline.
"""

import itertools
import json
import os
import re
import sys
import time

import pytest
from lab import FOUND_WITHIN_S, PATIENCE_S
from running import program

HOSTS = "node0:1,node1:2"


@pytest.fixture
def begin_mpi(lab, tmp_path):
    """Starts a program on the ranks of HOSTS, by an `mpirun` that lets the others live when one dies."""
    pytest.importorskip("mpi4py")
    from samestep.launch import mpirun

    if mpirun.find()[1] != "openmpi":
        pytest.skip("needs Open MPI's mpirun, which can be asked to go on")
    started = []

    def begin(function, *values):
        line, extra = mpirun.command(
            3,
            [sys.executable, *program("hosts/mpi_failures", function, *values)],
            hosts=HOSTS,
            export=["PYTHONPATH", "OMPI_MCA_mpi_yield_when_idle"],
        )
        own = {k: v for k, v in os.environ.items() if k.startswith(("OMPI_", "PRTE_"))}
        env = {**own, **extra, "OMPI_MCA_mpi_yield_when_idle": "1"}  # all hosts share the machine's cores
        env["PRTE_MCA_rmaps_default_mapping_policy"] = "slot:oversubscribe"
        started.append(lab.start("node0", [line[0], "--continuous", *line[1:]], cwd=tmp_path, env=env))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait(PATIENCE_S)
        process.stdout.close()  # what it had started ends with the lab


@pytest.fixture
def go(tmp_path):
    """Lets ranks that wait for it go on."""
    return (tmp_path / "go").touch


def reports(process):
    """What the ranks report, one after the other."""
    for text in process.stdout:
        if "{" in text:
            yield json.loads(text[text.index("{") :])


@pytest.fixture
def survivors(begin_mpi):
    """What the others print when the last rank does something to itself."""

    def run(operation, name, n_pending=0):
        process = begin_mpi("lose_the_last_rank", operation, name, n_pending)
        found, pid, ended = [], 0, set()
        try:
            for line in reports(process):
                pid = line.get("pid", pid)
                ended |= {line["ended"]} if "ended" in line else set()
                found += [line] if "kind" in line else []
                if len(ended) == 2:
                    break
        finally:
            if name == "SIGSTOP" and pid:
                os.kill(pid, 9)
        assert sorted(f["rank"] for f in found) == [0, 1]
        return found

    return run


@pytest.mark.parametrize(
    ("operation", "n_pending"),
    [("barrier", 0), ("allreduce", 3), ("recv", 0), ("barrier of a group", 0)],
)
def test_a_dead_rank_is_named_with_its_host(survivors, operation, n_pending):
    for found in survivors(operation, "SIGKILL", n_pending):
        assert found["kind"] == "PeerLostError", found
        assert found["transport"] == "hierarchical"
        assert re.search(r"rank 2 \((rank 2 of the world, )?node1\) has left group 'world", found["text"]), (
            found
        )
        assert "its process, at node1 (10.78.0.2:" in found["text"]
        assert found["after"] < FOUND_WITHIN_S


def test_a_stopped_rank_is_late_not_lost(survivors):
    for found in survivors("allreduce in 8 s", "SIGSTOP"):
        assert found["kind"] in {"TimeoutError", "PeerLostError"}  # of the one that gave up first
        assert "for rank 2 (node1)" in found["text"], found
        assert "has waited" in found["text"]
        assert "its process" not in found["text"]


@pytest.mark.parametrize(
    ("cut", "late"), [("drop", 0), ("drop", 3), ("unplug", 0), ("unplug", 3), ("power_off", 0)]
)
def test_a_host_that_cannot_be_reached_is_named(begin_mpi, lab, cut, late):
    lines = reports(begin_mpi("reduce_until_cut_off", late))
    assert sorted(line["ready"] for line in itertools.islice(lines, 3)) == [0, 1, 2]
    since = time.time()
    getattr(lab, cut)(1)
    found = next(line for line in lines if line.get("rank") == 0)  # what the others say does not come through
    assert found["kind"] == "PeerLostError", found
    assert re.search(r"rank [12] \(node1\) has left group 'world'", found["text"]), found
    assert "its host does not answer at node1 (10.78.0.2:" in found["text"], found
    assert found["at"] - since < FOUND_WITHIN_S


def test_a_fifth_of_the_packets_lost_makes_nothing_wrong(begin_mpi, lab, go):
    lines = reports(begin_mpi("reduce_over_a_bad_link"))
    assert sorted(line["ready"] for line in itertools.islice(lines, 3)) == [0, 1, 2]
    lab.lose(1, percent=20)
    go()
    for found in itertools.islice(lines, 3):
        assert found.get("right") == 12 or "has left group 'world'" in found["lost"], found


@pytest.mark.parametrize("mpi_begins_before", [False, True])
def test_a_host_that_comes_late_is_waited_for(begin_mpi, go, mpi_begins_before):
    lines = reports(begin_mpi("start_late", mpi_begins_before, 3))
    assert [line["comes"] for line in itertools.islice(lines, 3)] == [True] * 3
    go()
    assert [line["total"] for line in itertools.islice(lines, 3)] == [3.0] * 3


def test_a_rank_that_never_comes_is_named(begin_mpi):
    for found in itertools.islice(reports(begin_mpi("start_without_rank_2")), 2):
        text = "initialize: not all 3 ranks of the MPI world have called it after 4 s: rank 2 did not"
        assert found["text"] == text
        assert found["after"] < FOUND_WITHIN_S

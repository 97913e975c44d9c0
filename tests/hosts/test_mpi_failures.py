"""What becomes of ranks over MPI whose peers elsewhere die, vanish, stop, come late or never, or are hard to reach.

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
from lab import FOUND_WITHIN_S, PATIENCE_S, PRELUDE

HOSTS = "node0:1,node1:2"
SCRIPT = """
world = ss.initialize("mpi", timeout=60)
big = np.ones(400_000)
world.allreduce(big)
group = world.split(0)
world.barrier()
since = time.time()
if world.rank == world.size - 1:
    tell(pid=os.getpid())
    works = [world.iallreduce(big.copy()) for _ in range({under_way})]
    os.kill(os.getpid(), signal.{does})
try:
    [{act} for _ in range(10)]
except ss.Error as error:
    tell(rank=world.rank, engine=world.engine, kind=type(error).__name__, text=str(error), after=time.time() - since)
ss.finalize()
tell(ended=world.rank)
"""


CUT = """
world = ss.initialize("mpi", timeout=60)
big = np.ones(400_000)
world.barrier()
if world.rank:
    time.sleep({late})  # more than a second: rank 0 has asked whether they live
world.allreduce(big)
tell(ready=world.rank)
try:
    while True:
        world.allreduce(big)
except ss.Error as error:
    tell(rank=world.rank, kind=type(error).__name__, text=str(error), at=time.time())
time.sleep(1000)
"""
POORLY_REACHED = """
world = ss.initialize("mpi", timeout=100)
tell(ready=world.rank)
wait_for_go()
try:
    for i in range(1, 13):
        total = world.allreduce(np.arange(i * 1000.0) + world.rank)
        assert (total == 3 * np.arange(i * 1000.0) + 3).all()
    tell(rank=world.rank, right=i)
except ss.PeerLostError as error:
    tell(rank=world.rank, lost=str(error))
time.sleep(1000)
"""
LATE = """
if {mpi_begins_before}:
    import mpi4py.MPI
tell(comes=True)
if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
    wait_for_go()
    time.sleep({late})
world = ss.initialize("mpi", timeout=100)
tell(total=float(world.allreduce(np.ones(1))[0]))
world.barrier()
"""
NEVER = """
import mpi4py.MPI
if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
    signal.pause()
since = time.time()
try:
    ss.initialize("mpi", timeout=4)
except ss.TimeoutError as error:
    tell(text=str(error), after=time.time() - since)
time.sleep(1000)
"""
WAIT_FOR_GO = """
def wait_for_go():
    while not os.path.exists(__file__ + ".go"):
        time.sleep(0.01)

"""


@pytest.fixture
def begin_mpi(lab, tmp_path):
    """Starts a program on the ranks of HOSTS, by an `mpirun` that lets the others live when one dies."""
    pytest.importorskip("mpi4py")
    from samestep.launch import mpirun

    if mpirun.find()[1] != "openmpi":
        pytest.skip("needs Open MPI's mpirun, which can be asked to go on")
    started = []

    def begin(script):
        program = tmp_path / "program.py"
        program.write_text(PRELUDE + WAIT_FOR_GO + script)
        line, extra = mpirun.command(
            3,
            [sys.executable, str(program)],
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
    return (tmp_path / "program.py.go").touch


def told(process):
    """What the ranks tell, one after the other."""
    for text in process.stdout:
        if "{" in text:
            yield json.loads(text[text.index("{") :])


@pytest.fixture
def survivors(begin_mpi):
    """What the others print when the last rank does something to itself."""

    def run(act, does, under_way=0):
        process = begin_mpi(SCRIPT.format(act=act, does=does, under_way=under_way))
        found, pid, ended = [], 0, set()
        try:
            for line in told(process):
                pid = line.get("pid", pid)
                ended |= {line["ended"]} if "ended" in line else set()
                found += [line] if "kind" in line else []
                if len(ended) == 2:
                    break
        finally:
            if does == "SIGSTOP" and pid:
                os.kill(pid, 9)
        assert sorted(f["rank"] for f in found) == [0, 1]
        return found

    return run


@pytest.mark.parametrize(
    ("act", "under_way"),
    [("world.barrier()", 0), ("world.allreduce(big)", 3), ("world.recv(big, 2)", 0), ("group.barrier()", 0)],
)
def test_a_dead_rank_is_named_with_its_host(survivors, act, under_way):
    for found in survivors(act, "SIGKILL", under_way):
        assert found["kind"] == "PeerLostError", found
        assert found["engine"] == "hier"
        assert "rank 2 (node1) has left group 'world" in found["text"]
        assert "its process, at node1 (10.78.0.2:" in found["text"]
        assert found["after"] < FOUND_WITHIN_S


def test_a_stopped_rank_is_late_not_lost(survivors):
    for found in survivors("world.allreduce(big, timeout=8)", "SIGSTOP"):
        assert found["kind"] in {"TimeoutError", "PeerLostError"}  # of the one that gave up first
        assert "for rank 2 (node1); arrived: ranks 0 (node0), 1 (node1)" in found["text"], found
        assert "its process" not in found["text"]


@pytest.mark.parametrize(
    ("cut", "late"), [("drop", 0), ("drop", 3), ("unplug", 0), ("unplug", 3), ("power_off", 0)]
)
def test_a_host_that_cannot_be_reached_is_named(begin_mpi, lab, cut, late):
    lines = told(begin_mpi(CUT.format(late=late)))
    assert sorted(line["ready"] for line in itertools.islice(lines, 3)) == [0, 1, 2]
    since = time.time()
    getattr(lab, cut)(1)
    found = next(line for line in lines if line.get("rank") == 0)  # what the others say does not come through
    assert found["kind"] == "PeerLostError", found
    assert re.search(r"rank [12] \(node1\) has left group 'world'", found["text"]), found
    assert "its host does not answer at node1 (10.78.0.2:" in found["text"], found
    assert found["at"] - since < FOUND_WITHIN_S


def test_a_fifth_of_the_packets_lost_makes_nothing_wrong(begin_mpi, lab, go):
    lines = told(begin_mpi(POORLY_REACHED))
    assert sorted(line["ready"] for line in itertools.islice(lines, 3)) == [0, 1, 2]
    lab.lose(1, percent=20)
    go()
    for found in itertools.islice(lines, 3):
        assert found.get("right") == 12 or "has left group 'world'" in found["lost"], found


@pytest.mark.parametrize("mpi_begins_before", [False, True])
def test_a_host_that_comes_late_is_waited_for(begin_mpi, go, mpi_begins_before):
    lines = told(begin_mpi(LATE.format(mpi_begins_before=mpi_begins_before, late=3)))
    assert [line["comes"] for line in itertools.islice(lines, 3)] == [True] * 3
    go()
    assert [line["total"] for line in itertools.islice(lines, 3)] == [3.0] * 3


def test_a_rank_that_never_comes_is_named(begin_mpi):
    for found in itertools.islice(told(begin_mpi(NEVER)), 2):
        text = "initialize: not all 3 ranks of the MPI world have called it after 4 s: rank 2 did not"
        assert found["text"] == text
        assert found["after"] < FOUND_WITHIN_S

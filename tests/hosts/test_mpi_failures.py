"""Ranks of two hosts over MPI whose peers die or stop: `mpirun` is asked to let the others live."""

import json
import os
import sys
import time

import pytest
from lab import PATIENCE_S, PRELUDE

FOUND_WITHIN_S = 10.0 + 5.0  # and what a busy machine takes
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
    os.kill(os.getpid(), signal.{signal})
try:
    [{act} for _ in range(10)]
except ss.Error as error:
    tell(rank=world.rank, engine=world.engine, kind=type(error).__name__, text=str(error), after=time.time() - since)
ss.finalize()
tell(ended=world.rank)
"""


@pytest.fixture
def survivors(lab, tmp_path):
    """What the others print when the last rank does something to itself."""
    pytest.importorskip("mpi4py")
    from samestep.launch import mpirun

    if mpirun.find()[1] != "openmpi":
        pytest.skip("needs Open MPI's mpirun, which can be asked to go on")

    def run(act, signal, under_way=0):
        program = tmp_path / "program.py"
        program.write_text(PRELUDE + SCRIPT.format(act=act, signal=signal, under_way=under_way))
        line, extra = mpirun.command(
            3,
            [sys.executable, str(program)],
            hosts=HOSTS,
            export=["PYTHONPATH", "OMPI_MCA_mpi_yield_when_idle"],
        )
        own = {k: v for k, v in os.environ.items() if k.startswith(("OMPI_", "PRTE_"))}
        env = {**own, **extra, "OMPI_MCA_mpi_yield_when_idle": "1"}  # all hosts share the machine's cores
        env["PRTE_MCA_rmaps_default_mapping_policy"] = "slot:oversubscribe"
        process = lab.start("node0", [line[0], "--continuous", *line[1:]], cwd=tmp_path, env=env)
        found, pid, ended = [], 0, set()
        deadline = time.monotonic() + PATIENCE_S
        try:
            while len(ended) < 2 and time.monotonic() < deadline:
                text = process.stdout.readline()
                assert text, found
                if "{" not in text:
                    continue
                told = json.loads(text[text.index("{") :])
                pid = told.get("pid", pid)
                ended |= {told["ended"]} if "ended" in told else set()
                found += [told] if "kind" in told else []
        finally:
            if signal == "SIGSTOP" and pid:
                os.kill(pid, 9)
            process.kill()
            process.wait(PATIENCE_S)
            process.stdout.close()  # what it had started ends with the lab
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
    for found in survivors("world.allreduce(big, timeout=4)", "SIGSTOP"):
        assert found["kind"] in {"TimeoutError", "PeerLostError"}  # of the one that gave up first
        assert "for rank 2 (node1); arrived: ranks 0 (node0), 1 (node1)" in found["text"], found
        assert "its process" not in found["text"]

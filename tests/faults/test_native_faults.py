"""Ranks that die, stop, or come and go, without a launcher that ends the others: through shared memory and over TCP."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

PATIENCE_S = 60.0

PRELUDE = """
import json, os, signal, sys, time
import numpy as np
import samestep as ss

rank, size, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def start(n=None, timeout=30.0, suffix=""):
    return ss.initialize(
        "native", init_method=f"file://{place}/meeting{suffix}", rank=rank, world_size=n or size, timeout=timeout
    )

def tell(**what):
    print(json.dumps(what), flush=True)

"""

ACTS = {
    "a small allreduce": "world.allreduce(np.ones(1))",
    "an allreduce through the kernel": "world.allreduce(np.ones(1_000_000))",
    "a staged allreduce": "world.allreduce(np.ones(20_000))",
    "an allreduce in shared memory": "world.allreduce(shared)",
    "a broadcast": "world.bcast(np.ones(1_000_000), root=1)",
    "a receive": "world.recv(np.ones(3), 1)",
    "a barrier": "world.barrier()",
}


class Ranks:
    """Processes that meet through a file; what each prints is one JSON object a line."""

    def __init__(self, folder, script, n, engine):
        program = folder / "program.py"
        program.write_text(PRELUDE + script)
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
        environment["SAMESTEP_NATIVE_ENGINE"] = engine
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-u", str(program), str(rank), str(n), str(folder)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                text=True,
            )
            for rank in range(n)
        ]

    def line(self, rank):
        text = self.processes[rank].stdout.readline()
        assert text.startswith("{"), text + self.processes[rank].stdout.read()
        return json.loads(text)

    def end(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.communicate()


@pytest.fixture(params=["node", "tcp"])
def ranks(tmp_path, request):
    made = []

    def begin(script, n):
        made.append(Ranks(tmp_path, script, n, request.param))
        return made[-1]

    yield begin
    for each in made:
        each.end()


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_killed_rank_is_named_by_all_others(ranks, act):
    script = f"""
world = start()
shared = world.zeros(300_000)
world.barrier()
tell(pid=os.getpid())
if rank == 1:
    time.sleep(1000)
try:
    {act}
except ss.PeerLostError as error:
    tell(text=str(error), at=time.time())
try:
    world.allreduce(np.ones(2))
except ss.PeerLostError:
    ss.finalize()
    tell(ended=True)
"""
    job = ranks(script, 3)
    pids = [job.line(rank)["pid"] for rank in range(3)]
    killed_at = time.time()
    os.kill(pids[1], signal.SIGKILL)
    for rank in (0, 2):
        found = job.line(rank)
        assert "rank 1 has left group 'world'" in found["text"]
        assert found["at"] - killed_at < 2
        assert job.line(rank) == {"ended": True}
        assert job.processes[rank].wait(PATIENCE_S) == 0


def test_survivors_may_start_anew(ranks):
    script = """
world = start()
world.barrier()
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    world.barrier()
except ss.PeerLostError:
    pass
ss.finalize()
world = start(n=2, suffix=" of the survivors")
tell(total=world.allreduce(np.full(1000, rank + 1.0)).tolist()[0], size=world.size)
ss.finalize()
"""
    job = ranks(script, 3)
    for rank in range(2):
        assert job.line(rank) == {"total": 3.0, "size": 2}
        assert job.processes[rank].wait(PATIENCE_S) == 0


def test_a_stopped_rank_is_named_at_the_deadline(ranks):
    script = """
world = start(timeout=2.0)
world.barrier()
tell(pid=os.getpid())
if rank == 1:
    signal.pause()
begin = time.monotonic()
try:
    world.allreduce(np.ones(1_000_000))
except ss.TimeoutError as error:
    tell(text=str(error), seconds=time.monotonic() - begin)
"""
    job = ranks(script, 2)
    pids = [job.line(rank)["pid"] for rank in range(2)]
    os.kill(pids[1], signal.SIGSTOP)
    found = job.line(0)
    assert "for rank 1" in found["text"]
    assert 2 <= found["seconds"] < 10


def in_shared_memory():
    return sorted(name for name in os.listdir("/dev/shm") if "samestep" in name)


def test_coming_and_going_leaves_nothing_behind(ranks):
    script = """
import gc
def held():
    gc.collect()
    maps = sum("samestep" in line for line in open("/proc/self/maps"))
    return len(os.listdir("/proc/self/fd")), maps, len(os.listdir("/proc/self/task"))

seen = []
for i in range(60):
    with start() as world:
        shared = world.zeros(100_000)
        world.allreduce(shared)
        assert world.split(0).allreduce(np.full(5, 1.0))[0] == size
        del shared
    del world
    if i % 20 == 19:
        seen.append(held())
tell(seen=seen)
"""
    before = in_shared_memory()
    job = ranks(script, 2)
    for rank in range(2):
        counts = np.array(job.line(rank)["seen"])  # of 20, 40 and 60 worlds
        assert (np.diff(counts, axis=0) < 10).all(), (
            counts
        )  # the last world may be there with a mapping more or less
        assert job.processes[rank].wait(PATIENCE_S) == 0
    assert in_shared_memory() == before

"""Ranks that die, stop, or come and go, without a launcher that ends the others: through shared memory and over TCP."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

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
    os.write(1, (json.dumps(what) + "\\n").encode())  # at once: several processes write to one pipe

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
                start_new_session=True,  # its children end with it
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
                os.killpg(process.pid, signal.SIGKILL)  # what is stopped dies of it, too
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


@pytest.mark.parametrize(("ranks", "n_worlds"), [("node", 1000), ("tcp", 250)], indirect=["ranks"])
def test_many_worlds_leave_nothing_behind(ranks, tmp_path, n_worlds):
    script = f"""
n_worlds = {n_worlds}
"""
    script += """
import gc
def held():
    gc.collect()
    shared = sum("memfd" in line for line in open("/proc/self/maps"))
    return len(os.listdir("/proc/self/fd")), shared, len(os.listdir("/proc/self/task"))

def resident_kb():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024

seen, resident = [], []
for i in range(n_worlds):
    with start() as world:
        shared = world.zeros(100_000)
        world.allreduce(shared)
        assert world.split(0).allreduce(np.full(5, 1.0))[0] == size
        del shared
    del world
    ss.finalize()
    if (i + 1) % (n_worlds // 5) == 0:
        seen.append(held())
        resident.append(resident_kb())
tell(seen=seen, grown_kb=resident[-1] - resident[0])
"""
    job = ranks(script, 2)
    for rank in range(2):
        found = job.line(rank)
        first, *others = found["seen"]
        assert others == [first] * len(others)
        assert first[1] == 0
        assert found["grown_kb"] < 4096  # a world left behind holds more than 2 MB
        assert job.processes[rank].wait(PATIENCE_S) == 0
    assert not [name for name in os.listdir("/dev/shm") if "samestep" in name]
    assert os.listdir(tmp_path) == ["program.py"]


def test_a_rank_killed_at_any_moment_is_named_by_all_others(ranks):
    n_trials = 20
    script = f"""
import random

def mixed(world, shared, seed):
    choice = random.Random(seed)  # the same on all ranks
    private = [np.ones(n) for n in (1, 300, 20_000, 200_000)]
    acts = [lambda a=a: world.allreduce(a) for a in private]
    acts += [
        lambda: world.allreduce(shared),
        lambda: world.bcast(private[3], root=choice.randrange(3)),
        lambda: world.allgather(private[2]),
        lambda: world.reduce_scatter(private[3][:30_000].reshape(3, -1)),
        lambda: world.alltoall(private[2][:3000].reshape(3, -1)),
        lambda: world.barrier(),
        lambda: [work.wait() for work in [world.iallreduce(a) for a in private]],
        lambda: world.sendrecv(private[2], (world.rank + 1) % 3, private[2].copy(), (world.rank - 1) % 3),
    ]
    while True:
        choice.choice(acts)()

def trial(me, seed, begun):
    world = ss.initialize("native", init_method=f"file://{{place}}/trial{{seed}}", rank=me, world_size=3, timeout=20.0)
    shared = world.zeros(300_000)
    world.barrier()
    os.write(begun, b"b")
    try:
        mixed(world, shared, seed)
    except ss.PeerLostError as error:
        tell(seed=seed, rank=me, text=str(error), at=time.time())
    ss.finalize()

for seed in range({n_trials}):
    choice = random.Random(1000 + seed)
    victim, begun = choice.randrange(3), os.pipe()
    pids = []
    for me in range(3):
        pid = os.fork()
        if pid == 0:
            trial(me, seed, begun[1])
            os._exit(0)
        pids.append(pid)
    for _ in range(3):
        os.read(begun[0], 1)
    time.sleep(choice.uniform(0, 0.05))  # the moment; nobody waits for it
    killed_at = time.time()
    os.kill(pids[victim], signal.SIGKILL)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    tell(seed=seed, victim=victim, killed_at=killed_at, ends=ends)
    if sorted(ends) != [-signal.SIGKILL, 0, 0]:
        break
"""
    job = ranks(script, 1)
    for seed in range(n_trials):
        survivors = [job.line(0) for _ in range(2)]
        trial = job.line(0)
        victim = trial["victim"]
        assert trial["ends"] == [-signal.SIGKILL if rank == victim else 0 for rank in range(3)], trial
        assert {found["rank"] for found in survivors} == {0, 1, 2} - {victim}
        for found in survivors:
            assert found["seed"] == seed
            assert f"rank {victim} has left group 'world'" in found["text"]
            assert found["at"] - trial["killed_at"] < 2

"""NativeBackend over two hosts, which nothing but a network connects."""

import os
import signal
import time

import pytest

PATIENCE_S = 60.0
FOUND_WITHIN_S = 10.0 + 5.0  # and what a busy machine takes

VERBS = """
world = ss.initialize("native", timeout=60)
rank, n = world.rank, world.size
bits = hashlib.sha256()

def note(result):
    bits.update(np.ascontiguousarray(result).tobytes())

for count in (1, 5, 1000, 100_003, 2_000_003):
    def mine(seed=0):
        return np.random.default_rng(100 * seed + rank).standard_normal(count).astype("f4")

    for op in ("sum", "max", ss.AVG):
        note(world.allreduce(mine(), op))
    total = world.reduce(mine(1), "sum", root=2)
    note(world.bcast(total if rank == 2 else mine(2), root=2))
    note(world.allgather(mine(3)))
    blocks = np.concatenate([np.random.default_rng(r).standard_normal(count) for r in range(n)])
    note(world.bcast(blocks * (rank + 1), root=0))
    note(world.allgather(world.reduce_scatter(blocks.reshape(n, -1) * (rank + 1))))
    note(world.allgather(world.alltoall(blocks.reshape(n, -1) * (rank + 1))))
    gathered = world.gather(mine(4), root=1)
    scattered = world.scatter(gathered if rank == 1 else None, root=1, out=np.empty(count, "f4"))
    assert (scattered == mine(4)).all()
    got = np.empty(count, "f4")
    world.sendrecv(mine(5), (rank + 1) % n, got, (rank - 1) % n)
    note(world.allgather(got))
note(world.split(rank % 2).allreduce(np.full(3, rank, "f4")))
assert world.allgather_object(rank) == list(range(n))
place = (world.local_rank, world.local_size, world.node_rank, world.node_count)
note(world.node.allreduce(np.ones(3)))
note(world.cross.allreduce(np.ones(3)))
world.barrier()
engine = world.engine
ss.finalize()
tell(bits=bits.hexdigest() if rank % 2 == 0 else "", engine=engine, place=place)
"""


def test_all_verbs_give_the_bits_of_one_host(begin):
    two = begin(VERBS, [2, 2])
    found = two.lines()
    assert [f["engine"] for f in found] == ["hier"] * 4
    assert [f["place"] for f in found] == [[0, 2, 0, 2], [1, 2, 0, 2], [0, 2, 1, 2], [1, 2, 1, 2]]
    assert [p.wait(PATIENCE_S) for p in two.processes] == [0] * 4
    one = begin(
        VERBS.replace("world.node.", "world.split(rank // 2).").replace(
            "world.cross.", "world.split(rank % 2)."
        ),
        [4],
    )
    alone = one.lines()
    assert [f["engine"] for f in alone] == ["node"] * 4
    assert [f["bits"] for f in alone] == [f["bits"] for f in found]


def test_ipv6_and_a_named_interface(begin):
    script = """
world = ss.initialize("native", timeout=60)
tell(total=world.allreduce(np.full(100_000, world.rank + 1.0))[7], engine=world.engine)
ss.finalize()
"""
    job = begin(script, [1, 1], master="fd78::1", SAMESTEP_SOCKET_IFNAME="eth0")
    assert job.lines() == [{"total": 3.0, "engine": "tcp"}] * 2


def test_ranks_started_by_srun(begin):
    script = """
world = ss.initialize("native", init_method="env://", timeout=60)
tell(total=world.allreduce(np.full(3, world.rank + 1.0))[0], local=world.local_rank)
ss.finalize()
"""
    job = begin(script, [2, 1], under_slurm=True)
    assert job.lines() == [{"total": 6.0, "local": 0}, {"total": 6.0, "local": 1}, {"total": 6.0, "local": 0}]


def test_a_wrong_interface_name_lists_the_others(begin):
    script = """
try:
    ss.initialize("native", timeout=60)
except ValueError as error:
    tell(text=str(error))
"""
    for found in begin(script, [1, 1], SAMESTEP_SOCKET_IFNAME="eth7").lines():
        assert "'eth7'" in found["text"]
        assert "eth0" in found["text"]


def test_an_interface_that_leads_nowhere_is_told_on_all_ranks(begin):
    script = """
try:
    ss.initialize("native", timeout=60)
except ss.UnavailableError as error:
    tell(text=str(error))
"""
    for found in begin(script, [1, 1], SAMESTEP_SOCKET_IFNAME="lo").lines():
        assert "rank 1 cannot connect to rank 0 at node0 (127.0.0.1:" in found["text"]
        assert "Connection refused; SAMESTEP_SOCKET_IFNAME names" in found["text"]


ACTS = {
    "waiting": "world.barrier()",
    "in the middle of an allreduce": "[world.allreduce(big) for _ in range(100_000)]",
    "receiving": "world.recv(np.ones(3), (world.rank + 2) % 4)",
}
WORK = """
world = ss.initialize("native", timeout=100)
big = np.ones(4_000_000)
world.allreduce(big)
tell(pid=os.getpid())
if {sleeps}:
    time.sleep(1000)
try:
    {act}
except ss.PeerLostError as error:
    tell(text=str(error), at=time.time())
ss.finalize()
tell(ended=True)
"""


def check_survivor(job, rank, lost, since):
    found = job.line(rank)
    assert any(f"rank {r} has left group 'world'" in found["text"] for r in lost), found
    assert any(f"from {job.hosts[r]} (10.78.0." in found["text"] for r in lost) or "its" in found["text"], (
        found
    )
    assert found["at"] - since < FOUND_WITHIN_S
    assert job.line(rank) == {"ended": True}
    assert job.processes[rank].wait(PATIENCE_S) == 0


@pytest.mark.parametrize("act", ["waiting", "in the middle of an allreduce"])
def test_a_rank_killed_on_another_host_is_named(begin, act):
    job = begin(
        WORK.format(act=ACTS[act], sleeps="world.rank == 3 and 'barrier' in " + repr(ACTS[act])), [2, 2]
    )
    pids = [found["pid"] for found in job.lines()]
    since = time.time()
    os.kill(pids[3], signal.SIGKILL)
    for rank in range(3):
        check_survivor(job, rank, {3}, since)


@pytest.mark.parametrize("cut", ["drop", "unplug"])
def test_a_cut_cable_is_found_on_both_sides(lab, begin, cut):
    jobs = [
        begin(WORK.format(act=act, sleeps="'barrier' in " + repr(act) + " and world.rank == 3"), [2, 2])
        for act in ACTS.values()
    ]
    for job in jobs:
        job.lines()
    since = time.time()
    getattr(lab, cut)(1)
    for job in jobs:
        check_survivor(job, 0, {2, 3}, since)
        check_survivor(job, 1, {2, 3}, since)
        check_survivor(job, 2, {0, 1}, since)


STOPPED = """
world = ss.initialize("native", timeout=100)
big = np.ones(4_000_000)
world.allreduce(big)
tell(pid=os.getpid())
if world.rank == 1:
    signal.pause()
try:
    world.allreduce(big, timeout=12)
except ss.TimeoutError as error:
    tell(text=str(error))
"""
BUSY = """
world = ss.initialize("native", timeout=100)
chunk = np.ones(40_000)
world.barrier()
if world.rank == 0:
    works = [world.isend(chunk, 1) for _ in range(300)]
tell(pid=os.getpid())
if world.rank == 0:
    for work in works:
        work.wait()
else:
    os.kill(os.getpid(), signal.SIGSTOP)
    for _ in range(300):
        world.recv(chunk, 0)
world.barrier()
ss.finalize()
tell(ended=True)
"""


def test_ranks_that_do_nothing_for_longer_than_a_silent_host_may_are_not_lost(begin):
    stopped, busy = begin(STOPPED, [1, 1]), begin(BUSY, [1, 1])
    pids = [[found["pid"] for found in job.lines()] for job in (stopped, busy)]
    os.kill(pids[0][1], signal.SIGSTOP)
    assert "for rank 1" in stopped.line(0)["text"]  # at its deadline of 12 s
    os.kill(pids[1][1], signal.SIGCONT)  # its buffers are full
    assert busy.lines() == [{"ended": True}] * 2

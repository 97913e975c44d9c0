"""Programs of test_native_faults.py: ranks that die, stop, or come and go."""

import contextlib
import ctypes
import gc
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import samestep as ss
from native_rank import rank, report, size, start

CLONE_NEWPID = 0x20000000


def lose_rank_1_in(call):
    world = start()
    shared = world.zeros(300_000)
    calls = {
        "a small allreduce": lambda: world.allreduce(np.ones(1)),
        "an allreduce by CMA": lambda: world.allreduce(np.ones(1_000_000)),
        "a staged allreduce": lambda: world.allreduce(np.ones(20_000)),
        "an allreduce in shared memory": lambda: world.allreduce(shared),
        "a broadcast": lambda: world.bcast(np.ones(1_000_000), root=1),
        "a receive": lambda: world.recv(np.ones(3), 1),
        "a barrier": world.barrier,
    }
    world.barrier()
    report(pid=os.getpid())
    if rank == 1:
        signal.pause()
    try:
        calls[call]()
    except ss.PeerLostError as error:
        report(text=str(error), at=time.time(), ranks=error.ranks)
    try:
        world.allreduce(np.ones(2))
    except ss.PeerLostError:
        ss.finalize()
        report(ended=True)


def die_beside_a_forked_child():
    """Each rank in a PID namespace of its own, in which it is not the first process; its peer has no number there."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID) != 0:
        report(missing=f"PID namespaces: {os.strerror(ctypes.get_errno())}")
        return
    if os.fork():
        os.closerange(1, 3)  # here and below: the pipe ends with the rank
        os.wait()
        return
    if os.fork():
        os.closerange(1, 3)
        while True:  # the first process of the namespace, whose end would end the child of the rank
            signal.pause()
    report(missing="")
    world = start()
    world.barrier()
    if rank == 1:
        if os.fork() == 0:
            os.closerange(1, 3)
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)
    before = time.monotonic()
    try:
        world.barrier()
    except ss.PeerLostError as error:
        report(text=str(error), seconds=time.monotonic() - before)


def start_again_without_rank_2():
    world = start()
    with contextlib.suppress(ss.PeerLostError):
        world.barrier()  # of which TCP may lose the last message with a rank that is killed
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
    ss.finalize()
    world = start(n=2, store="store of the survivors")
    report(total=world.allreduce(np.full(1000, rank + 1.0)).tolist()[0], size=world.size)
    ss.finalize()


def wait_for_a_stopped_rank():
    world = start()
    world.barrier()
    report(pid=os.getpid())
    if rank == 1:
        signal.pause()
    begin = time.monotonic()
    try:
        world.allreduce(np.ones(1_000_000), timeout=0.3)
    except ss.TimeoutError as error:
        report(text=str(error), seconds=time.monotonic() - begin, ranks=error.ranks)


def open_many_worlds(n_worlds):
    def held():
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        shared = sum("memfd" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), shared, len(os.listdir("/proc/self/task"))

    def resident_kb():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024

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
    report(seen=seen, grown_kb=resident[-1] - resident[0])


def call_at_random(world, shared, seed):
    choice = random.Random(seed)  # the same on all ranks
    private = [np.ones(n) for n in (1, 300, 20_000, 200_000)]
    calls = [lambda a=a: world.allreduce(a) for a in private]
    calls += [
        lambda: world.allreduce(shared),
        lambda: world.bcast(private[3], root=choice.randrange(3)),
        lambda: world.allgather(private[2]),
        lambda: world.reduce_scatter(private[3][:30_000].reshape(3, -1)),
        lambda: world.alltoall(private[2][:3000].reshape(3, -1)),
        world.barrier,
        lambda: [work.wait() for work in [world.iallreduce(a) for a in private]],
        lambda: world.sendrecv(private[2], (world.rank + 1) % 3, private[2].copy(), (world.rank - 1) % 3),
    ]
    while True:
        choice.choice(calls)()


def run_until_a_rank_dies(me, seed, ready):
    world = start(n=3, timeout=20.0, store=f"trial{seed}", me=me)
    shared = world.zeros(300_000)
    world.barrier()
    os.write(ready, b"b")
    try:
        call_at_random(world, shared, seed)
    except ss.PeerLostError as error:
        report(seed=seed, rank=me, text=str(error), at=time.time())
    ss.finalize()


def kill_at_random_moments(n_trials):
    """Each trial forks three ranks and kills one of them."""
    for seed in range(n_trials):
        choice = random.Random(1000 + seed)
        victim, ready = choice.randrange(3), os.pipe()
        pids = []
        for me in range(3):
            pid = os.fork()
            if pid == 0:
                run_until_a_rank_dies(me, seed, ready[1])
                os._exit(0)
            pids.append(pid)
        for _ in range(3):
            os.read(ready[0], 1)
        time.sleep(choice.uniform(0, 0.05))  # the moment; nothing waits for it
        killed_at = time.time()
        os.kill(pids[victim], signal.SIGKILL)
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        report(seed=seed, victim=victim, killed_at=killed_at, ends=ends)
        if sorted(ends) != [-signal.SIGKILL, 0, 0]:
            break


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

"""What the ranks of `scaling.py measure` run, after values that it puts between PRELUDE and COMMON."""

PRELUDE = """
import json, os, time
import numpy as np
import samestep as ss

def tell(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())  # at once: several ranks may write to one pipe

"""

COMMON = """
if REALTIME:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))
world = ss.initialize("native", timeout=60)
me, n = world.rank, world.size

def max_over_ranks(value):
    return float(world.allreduce(np.array([float(value)]), "max")[0])

def timed(act, times):
    world.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        act()
    return (time.perf_counter() - begin) / times

def best(act, batches=7):
    # Of batches, for what else runs on the machine only adds. The first one spends what a limiter lets through at once;
    # calls follow each other without a pause in which it could save again. Enough of them for the quickest of three: of
    # few, what it saved would be much.
    times = max(1, int(BATCH_S / min(max_over_ranks(timed(act, 3)) for _ in range(3))))
    timed(act, times)
    return min(timed(act, times) for _ in range(batches))

word, got = np.zeros(1), np.zeros(1)

def shift():
    world.sendrecv(word, (me + 1) % n, got, (me - 1) % n)
"""

PAIR = """
other, many = 1 - me, 64
long, got_long = np.zeros(LONG // 8), np.zeros(LONG // 8)
a, b = np.ones(1 << 15, "f4"), np.ones(1 << 15, "f4")

def there_and_back():
    if me == 0:
        world.send(word, other)
    world.recv(got, other)
    if me == 1:
        world.send(word, other)

def flood():
    works = [world.isend(word, other) for _ in range(many)]
    for _ in range(many):
        world.recv(got, other)
    for work in works:
        work.wait()

def both_ways():
    world.sendrecv(long, other, got_long, other)

def add():
    for _ in range(100):
        np.add(a, b, out=a)

tell(
    half=best(there_and_back) / 2,
    flood=best(flood) / many,
    both_ways=best(both_ways) / long.nbytes,
    reduce=best(add) / 100 / (2 * a.nbytes),
)
ss.finalize()
"""
"""On two hosts: seconds of half a round trip, of a message sent and one received among many, of a byte in each
direction at the same time, and of a byte that is read to be reduced."""

CROWD = """
tell(barrier=best(world.barrier), shift=best(shift))
ss.finalize()
"""
"""On more hosts than there are processors: seconds of n - 1 messages of each rank at once, and of one of each."""

INSIDE = """
array = np.zeros(LONG // 4, "f4")
tell(seconds=best(lambda: world.allreduce(array)))
ss.finalize()
"""
"""On one host: seconds of an allreduce."""

TIMES = """
for algorithm in ALGORITHM_NAMES:
    world.barrier()
    world._comm.configure(algorithm=algorithm)
    for nbytes in SIZES:
        array = np.zeros(nbytes // 4, "f4")
        tell(algorithm=algorithm, nbytes=nbytes, seconds=best(lambda: world.allreduce(array)))
ss.finalize()
"""
"""Seconds of an allreduce, by algorithm and size."""

STEPS = """
tree = {str(i): np.zeros(count, "f4") for i, count in enumerate(LEAVES)}

def step():
    ss.allreduce_gradients(world, tree)

step()
tell(seconds=min(timed(step, 1) for _ in range(3)))
ss.finalize()
"""
"""Seconds to average the gradients of a model, in the buckets that training makes of them."""

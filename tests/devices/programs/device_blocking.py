"""Programs of test_device_blocking.py: blocking calls, which return once NCCL has them."""

import gc
import json
import os
import signal
import sys
import weakref

import fake_arrays
import numpy as np
from device_rank import attempt, rank, report, size, start
from fake_arrays import Array, Graph, Stream


class LeftError(Exception):
    """Of a signal handler."""


def leave_by_a_signal():
    """Rank 0 leaves its first call, for which NCCL connects the ranks once the other one comes."""
    world = start("nccl")
    stream = Stream()

    def leave(*_):
        raise LeftError

    def call():
        x = Array.of(np.full(3, rank + 1.0), stream)
        stream.synchronize()
        if rank == 0:
            signal.signal(signal.SIGALRM, leave)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        attempt(lambda: world.allreduce(x).get().tolist())
        return weakref.ref(x)

    if rank == 1:
        world.recv(np.empty(1), 0)
    array = call()
    gc.collect()
    if rank == 0:
        report(kept=array() is not None)
        world.send(np.ones(1), 1)
    report(next=world.allreduce(Array.of(np.full(3, rank + 1.0), stream)).get().tolist())
    world.close()


def call_in_a_forked_process():
    world = start("nccl")
    x = Array.of(np.ones(3), Stream())
    world.allreduce(x).get()
    child = os.fork()
    if child == 0:
        attempt(lambda: world.allreduce(x) and None)
        attempt(lambda: world.iallreduce(x) and None)
        os._exit(0)
    os.waitpid(child, 0)
    report(result=world.allreduce(x).get().tolist())
    world.close()


def overlap_inside_of_captures(n):
    """Each operation of a graph keeps memory of its own, because all graphs may run at any time."""
    world = start("nccl")
    stream = Stream()
    x, other = Array.of(np.zeros(size), stream), Array.of(np.zeros(1), stream)
    world.alltoall(x, out=x).get()
    before = fake_arrays.slow_calls().allocated
    graphs = []
    for _ in range(n):
        with Graph(stream, fake_arrays.RELAXED) as graph:
            world.alltoall(x, out=x)
        graphs.append(graph)
        for _ in range(20):  # the one that was captured has ended for the package
            world.iallreduce(other).wait(host=True)
    report(allocated=fake_arrays.slow_calls().allocated - before)
    for graph in graphs:
        x.set(np.arange(size) + 10.0 * rank)
        graph.launch(stream)
        report(numbers=x.get().tolist())
    world.close()


def close_after_a_mismatch(where, heard):
    """Of calls that have returned on both ranks, in the world or in a group of it."""
    world = start("nccl")
    group = world if where == "world" else world.split(0)
    for length in (3, 4, 3 + rank):
        x = Array.of(np.ones(length), Stream())
        attempt(lambda x=x: group.allreduce(x) and None)
    if heard:
        attempt(lambda: group.iallreduce(x).wait(host=True) and None)
    attempt(group.close)
    attempt(world.close)


def close_the_parent_of_a_failed_group():
    world = start("nccl")
    group = world.split(0)
    for length in (3, 4, 3 + rank):
        x = Array.of(np.ones(length), Stream())
        attempt(lambda x=x: group.allreduce(x) and None)
    world.allreduce(Array.of(np.ones(3), Stream())).get()
    attempt(world.close)
    report(left=fake_arrays.nccl_comms())


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

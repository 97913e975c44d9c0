"""Programs of test_device_mixed.py: ranks make one call with arrays in different memory, or different calls."""

import json
import os
import sys
import time

import numpy as np
from device_rank import attempt, meet, rank, report, size, start
from fake_arrays import Array, Stream

LATE_S = 1.5


def arrays(on_device, dtype=np.float64):
    """A row for each rank, and one row."""
    made = [np.ones((size, 3), dtype), np.ones((1, 3), dtype)]
    return [Array.of(x, Stream()) for x in made] if on_device else made


def calls_of(group, x, row):
    return {
        "allreduce": lambda: group.allreduce(x, timeout=60),
        "reduce": lambda: group.reduce(x, root=size - 1, timeout=60),
        "reduce_scatter": lambda: group.reduce_scatter(x, out=row, timeout=60),
        "bcast": lambda: group.bcast(x, timeout=60),
        "allgather": lambda: group.allgather(row, timeout=60),
        "gather": lambda: group.gather(row, timeout=60),
        "scatter": lambda: group.scatter(x, out=row, timeout=60),
        "alltoall": lambda: group.alltoall(x, timeout=60),
        "allgatherv": lambda: group.allgatherv(row, timeout=60),
        "gatherv": lambda: group.gatherv(row, timeout=60),
        "alltoallv": lambda: group.alltoallv(x, [1] * size, timeout=60),
        "iallreduce": lambda: group.iallreduce(x).wait(host=True),
        "ibcast": lambda: group.ibcast(x).wait(host=True),
        "iallgather": lambda: group.iallgather(row).wait(host=True),
    }


def each_verb(backend, device_rank):
    """Each in a group of its own, whose NCCL ends with the error."""
    world = start(backend, timeout=60.0)
    for verb in calls_of(world, *arrays(False)):
        group = world.split(0)
        call = calls_of(group, *arrays(rank == device_rank))[verb]
        attempt(lambda call=call: call() and None)
        meet(verb)
        report(sum=float(group.allreduce(np.ones(1))[0]))
    world.close()


def later(group, first):
    pending = group.iallreduce(first)
    group.allreduce(arrays(True)[0], timeout=60)
    pending.wait(host=True)


def unlike(backend, kind):
    """Rank 0 calls something, and the others something else."""
    world = start(backend, timeout=60.0)
    (x, _), (y, _) = arrays(True), arrays(False)
    small, _ = arrays(True, np.int16)
    calls = {
        "barrier": (world.barrier, lambda: world.allreduce(x, timeout=60)),
        "not NCCL's": (lambda: world.allreduce(x, timeout=60), lambda: world.allreduce(small, timeout=60)),
        "waited for later": (lambda: later(world, x), lambda: later(world, y)),
        "close": (world.close, lambda: world.allreduce(y, timeout=60)),
    }
    attempt(lambda: calls[kind][min(rank, 1)]() and None)
    if kind != "close":  # which waits for the others
        meet(kind)
    os._exit(0)


def late(backend):
    """A rank that is merely late is waited for, whatever the others have called meanwhile."""
    world = start(backend, timeout=60.0)
    for on_device in (True, False):
        (x, _), (y, _) = arrays(on_device), arrays(not on_device)
        if rank == size - 1:
            time.sleep(LATE_S)  # longer than the others wait before they look
        pending = world.iallreduce(x)
        if rank == size - 1:
            time.sleep(LATE_S)
        world.allreduce(y, timeout=60)
        pending.wait(host=True)
        report(sums=[float((each.get() if isinstance(each, Array) else each)[0, 0]) for each in (x, y)])
        world.barrier()
    world.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

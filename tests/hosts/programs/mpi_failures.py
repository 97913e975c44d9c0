"""Programs of test_mpi_failures.py: ranks over MPI whose peers elsewhere die, vanish, stop, or come late.

The file `go` in the folder of the job lets ranks that wait for it go on.
"""

import json
import os
import signal
import sys
import time

import numpy as np
import samestep as ss
from host_rank import report


def wait_for_go():
    while not os.path.exists("go"):
        time.sleep(0.01)


def lose_the_last_rank(operation, name, n_pending):
    """The last rank starts `n_pending` operations and then sends itself the signal `name`."""
    world = ss.initialize("mpi", timeout=60)
    big = np.ones(400_000)
    world.allreduce(big)
    group = world.split(0)
    calls = {
        "barrier": world.barrier,
        "allreduce": lambda: world.allreduce(big),
        "allreduce in 8 s": lambda: world.allreduce(big, timeout=8),
        "recv": lambda: world.recv(big, 2),
        "barrier of a group": group.barrier,
    }
    world.barrier()
    since = time.time()
    if world.rank == world.size - 1:
        report(pid=os.getpid())
        works = [world.iallreduce(big.copy()) for _ in range(n_pending)]
        os.kill(os.getpid(), signal.Signals[name])
        del works
    try:
        for _ in range(10):
            calls[operation]()
    except ss.Error as error:
        kind, after = type(error).__name__, time.time() - since
        report(rank=world.rank, transport=world.transport, kind=kind, text=str(error), after=after)
    ss.finalize()
    report(ended=world.rank)


def reduce_until_cut_off(late):
    world = ss.initialize("mpi", timeout=60)
    big = np.ones(400_000)
    world.barrier()
    if world.rank:
        time.sleep(late)  # more than a second: rank 0 has asked whether they live
    world.allreduce(big)
    report(ready=world.rank)
    try:
        while True:
            world.allreduce(big)
    except ss.Error as error:
        report(rank=world.rank, kind=type(error).__name__, text=str(error), at=time.time())
    time.sleep(1000)


def reduce_over_a_bad_link():
    world = ss.initialize("mpi", timeout=100)
    report(ready=world.rank)
    wait_for_go()
    try:
        for i in range(1, 13):
            total = world.allreduce(np.arange(i * 1000.0) + world.rank)
            assert (total == 3 * np.arange(i * 1000.0) + 3).all()
        report(rank=world.rank, right=i)
    except ss.PeerLostError as error:
        report(rank=world.rank, lost=str(error))
    time.sleep(1000)


def start_late(mpi_begins_before, late):
    if mpi_begins_before:
        import mpi4py.MPI  # noqa: F401
    report(comes=True)
    if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
        wait_for_go()
        time.sleep(late)
    world = ss.initialize("mpi", timeout=100)
    report(total=float(world.allreduce(np.ones(1))[0]))
    world.barrier()


def start_without_rank_2():
    import mpi4py.MPI  # noqa: F401

    if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
        signal.pause()
    since = time.time()
    try:
        ss.initialize("mpi", timeout=4)
    except ss.TimeoutError as error:
        report(text=str(error), after=time.time() - since)
    time.sleep(1000)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

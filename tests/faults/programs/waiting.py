"""Programs of test_waiting.py: ranks that wait for one that is lost, missing, or waits itself."""

import json
import os
import signal
import sys
import time

import numpy as np
import samestep as ss
from native_rank import rank, report, start


def receive_from_any_while_rank_1_dies():
    world = start(timeout=60.0)
    world.barrier()
    report(pid=os.getpid())
    if rank == 1:
        signal.pause()
    try:
        world.barrier() if rank == 0 else world.recv(np.ones(3))
    except ss.PeerLostError as error:
        report(text=str(error), at=time.time())


def receive_from_any_while_ranks_finish():
    world = start(timeout=60.0)
    world.barrier()
    if rank == 1:
        world.send(np.full(3, 1.0), 0)
        sys.exit(0)  # without finalize
    if rank == 2:
        world.recv(np.empty(1), 0)
        world.send(np.full(3, 2.0), 0)
        ss.finalize()
        sys.exit(0)
    x = np.empty(3)
    world.recv(x)
    found, late = [x[0]], "1"
    while "1" in late:  # until this rank knows that rank 1 has left
        try:
            world.recv(x, timeout=0.2)
        except ss.TimeoutError as error:
            late = str(error).partition(" s for ")[2]
    world.send(np.zeros(1), 2)
    world.recv(x)
    report(found=[*found, x[0]], late=late)


def reduce_without_rank_2():
    world = start()
    world.barrier()
    if rank == 2:
        signal.pause()
    # The others start the operation and tell each other before any of them gives up: only rank 2 is late.
    work = world.iallreduce(np.ones(3))
    started = [world.isend(np.ones(1), peer) for peer in (0, 1, 3) if peer != rank]
    for _ in started:
        world.recv(np.empty(1))
    try:
        work._wait_blocking([0.5, 0.6, None, 30.0][rank])
    except ss.Error as error:
        report(kind=type(error).__name__, text=str(error))


def wait_for_each_other_while_rank_3_dies():
    """Rank 0 learns of the death, and lives on."""
    world = start()
    pair = world.group([2, 0]) if rank in (0, 2) else None
    world.barrier()
    report(pid=os.getpid())
    if rank == 3:
        signal.pause()
    calls = [world.barrier, lambda: world.recv(np.ones(3), 0), pair and pair.barrier]
    try:
        calls[rank]()
    except ss.PeerLostError as error:
        report(text=str(error), at=time.time())
    if rank == 0:
        signal.pause()


def join_after_the_others_have_left():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    world = start()
    world.barrier()
    report(pid=os.getpid())
    if rank == 5:
        signal.pause()
    if rank == 0:
        signal.sigwait([signal.SIGUSR1])
    world.barrier()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

"""Programs of test_host_failures.py: ranks whose peers on other hosts die, vanish, stop, or come late."""

import json
import os
import signal
import sys
import time

import numpy as np
import samestep as ss
from host_rank import report, report_error


def lose_a_host_while(state):
    """`state`: "all wait", "all work" or "all receive"."""
    world = ss.initialize("native", timeout=100)
    big = np.ones(400_000)
    world.allreduce(big)
    report(pid=os.getpid())
    try:
        if state == "all work":
            for _ in range(1_000_000):
                world.allreduce(big)
        elif state == "all receive":
            world.recv(np.ones(3), (world.rank + world.size // 2) % world.size)
        elif world.rank != world.size - 1:
            world.barrier()
        else:
            time.sleep(1000)
    except ss.PeerLostError as error:
        report(text=str(error), at=time.time())
    ss.finalize()
    report(ended=True)


def wait_for_a_stopped_rank():
    world = ss.initialize("native", timeout=100)
    big = np.ones(400_000)
    world.allreduce(big)
    report(pid=os.getpid())
    if world.rank == 1:
        signal.pause()
    report_error(ss.TimeoutError, lambda: world.allreduce(big, timeout=12))


def send_to_a_stopped_rank():
    """More than all buffers hold; rank 1 continues later."""
    world = ss.initialize("native", timeout=100)
    chunk = np.ones(40_000)
    world.barrier()
    if world.rank == 0:
        works = [world.isend(chunk, 1) for _ in range(300)]
    report(pid=os.getpid())
    if world.rank == 0:
        for work in works:
            work.wait()
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
        for _ in range(300):
            world.recv(chunk, 0)
    world.barrier()
    ss.finalize()
    report(ended=True)


def reduce_over_a_bad_link():
    world = ss.initialize("native", timeout=100)
    report(pid=os.getpid())
    try:
        for i in range(1, 31):
            total = world.allreduce(np.arange(i * 1000.0) + world.rank)
            assert (total == 2 * np.arange(i * 1000.0) + 1).all()
        report(right=i)
    except ss.PeerLostError as error:
        report(lost=str(error))


def start_alone():
    report_error(ss.TimeoutError, lambda: ss.initialize("native", timeout=4))


def start_late():
    report(pid=os.getpid())
    world = ss.initialize("native", timeout=100)
    report(total=world.allreduce(np.full(3, world.rank + 1.0))[0])


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

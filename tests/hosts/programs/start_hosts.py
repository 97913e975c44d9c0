"""Programs of test_start_hosts.py: ranks that a launcher has started on several hosts."""

import json
import os
import sys
import time

import numpy as np
import samestep as ss
from host_rank import report


def reduce_once(backend, *words):
    world = ss.initialize(backend, timeout=60)
    total = world.allreduce(np.full(1000, world.rank + 1.0))[7]
    variables = [os.environ.get(name) for name in ("LOCAL_RANK", "GROUP_RANK", "WITH")]
    place = [world.local_rank, world.node_rank]
    host = os.uname().nodename
    report(rank=world.rank, host=host, total=total, place=place, variables=variables, words=words)
    ss.finalize()


def gather_objects():
    try:
        world = ss.initialize(timeout=20)
        report(rank=world.rank, gathered=world.allgather_object(str(world.rank)))
        ss.finalize()
    except (ss.UnavailableError, ss.TimeoutError) as error:
        report(rank=int(os.environ["RANK"]), error=str(error))


def fail_on_rank_2():
    world = ss.initialize("native", timeout=60)
    world.barrier()
    if world.rank == 2:
        print("out of luck", file=sys.stderr)
        os._exit(7)
    time.sleep(1000)


def wait_after_a_loss():
    world = ss.initialize("native", timeout=60)
    world.barrier()
    report(rank=world.rank)
    try:
        world.barrier() if world.rank else time.sleep(1000)
    except ss.PeerLostError:
        time.sleep(1000)


def wait_on_rank_0():
    world = ss.initialize("native", timeout=60)
    world.barrier()
    report(rank=world.rank)
    world.barrier() if world.rank == 0 else time.sleep(1000)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

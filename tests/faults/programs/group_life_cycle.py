"""Programs of test_group_life_cycle.py: groups that are made and closed many times, or closed too early."""

import gc
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import samestep as ss


def use_groups(n):
    world = ss.initialize(timeout=60)
    data = np.ones(100_000)

    def use_a_group(i):
        group = world.split(0) if i % 2 else world.group(range(world.size))
        group.allreduce(data)
        request = group.irecv(np.empty(3), (group.rank + 1) % group.size)
        group.send(np.ones(3), (group.rank - 1) % group.size)
        request.wait()
        group.split(0)  # closed with its parent
        group.close()

    def held():
        gc.collect()
        status = Path("/proc/self/status").read_text().splitlines()
        rss = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        maps = Path("/proc/self/maps").read_text().count("\n")
        return len(os.listdir("/proc/self/fd")), maps, len(world._children), rss / 1024

    for i in range(50):
        use_a_group(i)
    before = held()
    for i in range(n):
        use_a_group(i)
    print(json.dumps([before, held()]), flush=True)
    ss.finalize()


def close_with_pending(operations):
    world = ss.initialize(timeout=60)
    world.barrier()
    data, other = np.ones(200_000), (world.rank + 1) % world.size
    if operations == "messages":
        works = [world.irecv(data.copy(), other, tag=1), world.isend(data, other, tag=2)]
    elif operations == "collectives":
        works = [world.iallreduce(data + i) for i in range(2)]
    else:
        works = [world.iallreduce(data)] if world.rank == 0 else []
    begin = time.monotonic()
    try:
        ss.finalize()
        closed = ""
    except ss.Error as error:
        closed = type(error).__name__
    outcomes = []
    for work in works:
        try:
            work.wait()
            outcomes.append("result")
        except ss.Error as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    print(json.dumps([closed, outcomes, time.monotonic() - begin]), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

"""Programs of test_dist_exits.py: processes that end without destroy_process_group."""

import atexit
import json
import sys
from pathlib import Path

import numpy as np
import samestep.distributed as dist


def end_while_sending(backend, operation, count):
    """Rank 0 does not wait; rank 1 receives once rank 0 has started to exit."""
    dist.init_process_group(backend)
    x = np.full(count, 7.0)
    if dist.get_rank() == 0:
        if operation == "send":
            dist.isend(x, 1)
        else:
            dist.broadcast(x, 0, async_op=True)
        atexit.register(Path("ends").touch)  # called before what was registered earlier
        return
    while not Path("ends").exists():
        pass
    received = np.empty(count)
    dist.recv(received, 0) if operation == "send" else dist.broadcast(received, 0)
    print(received.sum())


def exit_without_destroy(code):
    dist.init_process_group("gloo")
    dist.new_group([0])
    dist.all_reduce(np.ones(3))
    dist.irecv(np.ones(3), 1 - dist.get_rank())
    sys.exit(code)


def start_and_destroy_five_times():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for k in range(5):
        part = dist.new_group([0, 1])
        x = np.ones(3)
        dist.all_reduce(x, group=part)
        if k == 0:
            dist.irecv(np.ones(1), 1 - rank)  # nobody sends, which costs a second
        dist.destroy_process_group()
        dist.init_process_group("gloo")
    print(rank, x[0])


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

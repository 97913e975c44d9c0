"""One process of several that make groups of different sizes, one after another, from stores of their own."""

import gc
import json
import os
import signal
import sys
from datetime import timedelta
from types import SimpleNamespace

import samestep as ss
import torch
import torch.distributed as dist
from samestep.torch.process_group import ProcessGroup

LIMIT = timedelta(seconds=60)


def open_group(store, name, rank, size):
    options = SimpleNamespace(
        store=dist.PrefixStore(name, store),
        group_rank=rank,
        group_size=size,
        timeout=LIMIT,
        global_ranks_in_group=[],
        group_id=name,
    )
    return ProcessGroup(options, name=name)


def held():
    """Descriptors, mapped shared memory, and threads of this process."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        n_mapped = sum("memfd:samestep" in line for line in maps)
    return [len(os.listdir("/proc/self/fd")), n_mapped, len(os.listdir("/proc/self/task"))]


def sums(group):
    """One short sum and one that is long enough for other ranks to read this memory."""
    found = []
    for count in (3, 100_000):
        values = torch.full((count,), group.getRank() + 1.0)
        group.allreduce([values], dist.ReduceOp.SUM).wait()
        found.append(sorted(set(values.tolist())))
    return found


def left_by_all(port, rank, sizes):
    """Each group is left by all of its ranks, without waiting, before the next is made."""
    store, found = dist.TCPStore("127.0.0.1", port, timeout=LIMIT, wait_for_workers=False), []
    for number, size in enumerate(sizes):
        if rank < size:
            group = open_group(store, f"group {number}", rank, size)
            found.append([size, sums(group), held()])
            group.abort()
            del group
    print(json.dumps(found))


def fails_each_time(port, rank, n_groups):
    """Rank 0 leaves each group at once; the others fail in it. The last rank kills itself in the last group."""
    store, found = dist.TCPStore("127.0.0.1", port, timeout=LIMIT, wait_for_workers=False), []
    for number in range(n_groups):
        group = open_group(store, f"group {number}", rank, 3)
        values = torch.ones(1 << 20)
        if number == n_groups - 1 and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if number < n_groups - 1 and rank == 0:
            text = ""
        else:
            try:
                group.allreduce([values], dist.ReduceOp.SUM).wait()
                text = "no error"
            except ss.PeerLostError as error:
                text = str(error)
        group.abort()
        del group, values
        found.append([text, held()])
    group = open_group(store, "the last", rank, 2)
    found.append([sums(group), held()])
    group.abort()
    print(json.dumps(found))


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

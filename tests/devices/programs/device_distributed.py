"""The program of test_device_distributed.py: every operation of samestep.distributed on device arrays."""

import json
import sys

import fake_arrays
import numpy as np
import samestep.distributed as dist
from device_rank import rank, report, size, store
from fake_arrays import Array, Stream


def use_each_operation(backend):
    dist.init_process_group(backend, init_method=store(), rank=rank, world_size=size)
    stream = Stream()
    x = Array.of(np.full(7, rank + 1.0), stream)
    report(nccl=dist.is_nccl_available(), device=dist.group.WORLD is not None)
    dist.all_reduce(x)
    report(sum=x.get().tolist())
    dist.broadcast(x, src=size - 1)
    parts = [Array((7,), "float64", stream) for _ in range(size)]
    dist.all_gather(parts, Array.of(np.full(7, float(rank)), stream))
    report(parts=[part.get().tolist() for part in parts])
    mine = Array((7,), "float64", stream)
    dist.scatter(mine, parts if rank == 0 else None, src=0)
    dist.gather(mine, parts if rank == 1 else None, dst=1)
    report(mine=mine.get().tolist(), parts=[part.get().tolist() for part in parts])
    wide = Array.of(np.full((2, 3), rank + 1.0), stream)
    dist.all_reduce(wide)
    report(wide=wide.get().tolist())
    other = (rank + 1) % size
    request = dist.isend(Array.of(np.full(3, float(rank)), stream), other)
    received = Array((3,), "float64", stream)
    dist.recv(received, (rank - 1) % size)
    request.wait()
    report(received=received.get().tolist())
    with_two = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=with_two)
    lists = []
    for index in range(2):
        fake_arrays.call("SetDevice", index)
        lists.append(Array.of(np.full(5, 10.0 * rank + index), Stream()))
    dist.all_reduce_multigpu(lists)
    report(lists=[part.get().tolist() for part in lists])
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

"""The program of test_device_distributed.py: every operation of samestep.distributed on device arrays."""

import json
import sys

import fake_arrays
import fake_jax
import fake_torch
import numpy as np
import samestep.distributed as dist
from device_rank import rank, report, size, store
from fake_arrays import Array, ConvertingArray, Stream
from samestep.gpu.device_array import DeviceArray


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


def use_arrays_that_cannot_be_written(backend, kinds):
    """Rank r has an array of `kinds[r]`. Ranks agree on the number of elements only."""
    with fake_jax.installed():
        dist.init_process_group(backend, init_method=store(), rank=rank, world_size=size, timeout=20.0)
        for shape in [(6,), (2, 3)] if rank == 0 else [(3, 2), (6,)]:
            for verb in (dist.broadcast, dist.reduce, dist.all_reduce):
                for async_op in (False, True):
                    x = made(kinds[rank], np.full(shape, rank + 1.0, "float32"))
                    before = fake_arrays.nccl_calls()
                    root = (
                        {}
                        if verb is dist.all_reduce
                        else {"group_src" if verb is dist.broadcast else "group_dst": 1}
                    )
                    y = verb(x, async_op=async_op, **root)
                    y = y.wait() if async_op else y
                    report(
                        replaced=y is not None and y is not x,
                        kept=x.get().tolist() == np.full(shape, rank + 1.0).tolist(),
                        shape=list(shape) == list((x if y is None else y).shape),
                        result=elements(x if y is None else y)[0],
                        nccl=fake_arrays.nccl_calls() - before,
                    )
        dist.destroy_process_group()


def average_16_bits(library, shapes):
    """Calls of which some ranks wait for the request, others in the call."""
    if library == "torch":
        fake_torch.install()
    dist.init_process_group("nccl", init_method=store(), rank=rank, world_size=size, timeout=20.0)
    values = np.full(shapes[rank], rank + 1.0, "float16")
    for verb in (dist.all_reduce, dist.reduce):
        root = {} if verb is dist.all_reduce else {"dst": 0}
        for async_ranks in ([0, 1], [], [0], [1]):
            x = fake_torch.tensor(values) if library == "torch" else ConvertingArray.of(values, Stream())
            before = fake_arrays.nccl_calls()
            request = verb(x, op="avg", async_op=rank in async_ranks, **root)
            if request is not None:
                assert request.wait() is None
            report(result=elements(x)[0], nccl=fake_arrays.nccl_calls() - before)
    dist.destroy_process_group()


def made(kind, values):
    if kind == "jax":
        return fake_jax.late(values)
    array = Array.of(values, Stream())
    array.readonly = kind == "readonly"
    return array


def elements(array):
    values = array.numpy() if isinstance(array, DeviceArray) else array.get()
    assert (values == values.flat[0]).all(), values
    return values.ravel().tolist()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

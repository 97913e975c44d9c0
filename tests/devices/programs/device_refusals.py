"""Programs of test_device_refusals.py: one rank cannot begin a collective, and then calls nothing."""

import ctypes
import json
import os
import sys

import fake_arrays
import numpy as np
import samestep as ss
from device_rank import attempt, meet, rank, report, size, start, use_only
from fake_arrays import Array, ConvertingArray, Graph, Stream

LAST = size - 1


class OfAnotherRuntime:
    """Memory that says that it is ROCm's."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return 10, 0

    def __dlpack__(self, *, stream=None, max_version=None):
        x = self.array
        kind = "rocm"
        return ss._core.to_dlpack(x, x.address, str(x.dtype), list(x.shape), kind, 0, max_version is not None)


def elsewhere(world):
    """Numbers on a device that no rank uses."""
    use_only(-1)
    fake_arrays.call("SetDevice", 3)
    made = Array.of(np.ones((size, 3)))
    fake_arrays.call("SetDevice", world.device)
    return made


def each_verb(backend):
    """Each in a group of its own, whose NCCL ends with the error."""
    world = start(backend, timeout=60.0)
    x, row = Array.of(np.ones((size, 3)), Stream()), Array.of(np.ones(3), Stream())
    bad = elsewhere(world) if rank == LAST else x
    calls = {
        "allreduce": lambda group: group.allreduce(bad, timeout=60),
        "iallreduce": lambda group: group.iallreduce(bad).wait(host=True),
        "reduce": lambda group: group.reduce(bad, root=0, timeout=60),
        "reduce_scatter": lambda group: group.reduce_scatter(bad, out=row, timeout=60),
        "bcast": lambda group: group.bcast(bad, timeout=60),
        "allgather": lambda group: group.allgather(bad, timeout=60),
        "gather": lambda group: group.gather(bad, timeout=60),
        "scatter": lambda group: group.scatter(x, out=bad, timeout=60),
        "alltoall": lambda group: group.alltoall(bad, timeout=60),
        "allgatherv": lambda group: group.allgatherv(bad, timeout=60),
        "gatherv": lambda group: group.gatherv(bad, timeout=60),
        "alltoallv": lambda group: group.alltoallv(bad, [1] * size, timeout=60),
        "allreduce_tree": lambda group: group.allreduce_tree({"a": x, "b": bad}, timeout=60),
        "synchronize": lambda group: ss.synchronize(group, {"a": x, "b": bad}, timeout=60),
    }
    for verb, call in calls.items():
        group = world.split(0)
        attempt(lambda call=call, group=group: call(group) and None)
        meet(verb)
        report(sum=float(group.allreduce(np.ones(1))[0]))
    world.close()


def each_reason(backend):
    world = start(backend, timeout=60.0)
    stream = Stream()
    x, freed = Array.of(np.ones(7), stream), Array.of(np.ones(7), stream)
    half = ConvertingArray.of(np.ones(7, "float16"), stream)
    stream.synchronize()
    on_host = np.ones(7)
    fake_arrays.call("Free", ctypes.c_void_p(freed.address))

    def captured(call):
        with Graph(stream):
            call()

    refused = {
        "freed": lambda group: group.allreduce(freed, timeout=60),
        "out on the host": lambda group: group.allreduce(x, out=on_host, timeout=60),
        "in on the host": lambda group: group.allreduce(on_host, out=x, timeout=60),
        "of another runtime": lambda group: group.allreduce(OfAnotherRuntime(x), timeout=60),
    }
    if backend == "native":  # what is of NCCL becomes part of the graph
        refused["captured"] = lambda group: captured(lambda: group.allreduce(x, timeout=60))
        refused["captured average"] = lambda group: captured(lambda: group.allreduce(half, "avg", timeout=60))
    for why, call in refused.items():
        group = world.split(0)
        if rank == LAST:
            attempt(lambda call=call, group=group: call(group) and None)
        elif why == "captured average":
            attempt(lambda group=group: group.allreduce(half, "avg", timeout=60) and None)
        else:
            attempt(lambda group=group: group.allreduce(x, timeout=60) and None)
        meet(why)
        report(sum=float(group.allreduce(on_host)[0]))
        on_host[:] = 1
    freed.address = 0
    world.close()


def behind_others(backend):
    """What the refused rank has begun before ends well."""
    world = start(backend, timeout=60.0)
    x, y = Array.of(np.ones(300_000), Stream()), Array.of(np.ones(3), Stream())
    bad = elsewhere(world) if rank == LAST else y
    x.stream.delay(50_000)
    before = world.iallreduce(x)
    attempt(lambda: world.allreduce(bad, timeout=60) and None)
    meet("refused")
    attempt(lambda: before.wait(host=True) and None)
    os._exit(0)


def nobody_else_calls(backend):
    """The others close the world instead."""
    world = start(backend, timeout=60.0)
    world.allreduce(Array.of(np.ones(3), Stream()))
    if rank == LAST:
        bad = elsewhere(world)
        attempt(lambda: world.iallreduce(bad) and None)
    attempt(world.close)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

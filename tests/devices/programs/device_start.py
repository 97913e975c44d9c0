"""Programs of test_device_start.py: which device a rank gets, and what device memory is."""

import ctypes
import json
import sys

import numpy as np
import samestep as ss
import samestep.distributed as dist
from device_rank import attempt, rank, report, size, start, store
from fake_arrays import Array, counts, nccl_interfaces, runtime
from samestep.gpu.device_array import DeviceArray
from samestep.gpu.runtime import current_gpu


def reduce_once(backend="nccl", devices=None):
    def reduce():
        world = start(backend, **({} if devices is None else {"cuda_devices": devices}))
        return [world.kind, world.device, world.allreduce(Array.of(np.ones(3, "float32"))).get().tolist()]

    attempt(reduce)


def name_interfaces():
    world = start()
    report(named=nccl_interfaces())
    world.close()


def make_groups(backend):
    """Blocks of device memory, blocks of pinned memory, streams and events of three groups, before and after use."""
    world = start(backend)
    before = counts()
    groups = [world.split(0) for _ in range(3)]
    for group in groups:
        group.allreduce(np.ones(3))
    report(for_the_host=[now - then for now, then in zip(counts(), before, strict=True)])
    groups[0].iallreduce(Array.of(np.ones(3, "float32"))).wait()
    report(streams=counts()[2] - before[2])
    world.close()


def reduce_without_devices():
    world = start("native", cuda_devices=ss.missing)
    report(device=world.device)
    attempt(lambda: world.allreduce(Array.of(np.ones(3, "float32"))))


def reduce_with_hip(backend):
    """Two sums in place; the second is looked at while it waits for a stream."""
    world = start(backend, cuda_devices=ss.missing)
    library, stream, ones = runtime(hip=True), ctypes.c_void_p(), np.ones(3, "float32")
    assert library.hipStreamCreateWithFlags(ctypes.byref(stream), 0) == 0
    x = DeviceArray(current_gpu("hip"), "float32", ones.shape, stream=stream.value)
    address = ctypes.c_void_p(x.__cuda_array_interface__["data"][0])
    assert library.hipMemcpyAsync(address, ctypes.c_void_p(ones.ctypes.data), ones.nbytes, 4, stream) == 0
    world.allreduce(x)
    library.fakeHold(stream)
    work = world.iallreduce(x)
    was_done = any(work.done() for _ in range(1000))  # often, because other threads look at it too
    last = library.hipPeekAtLastError()
    library.fakeRelease(stream)
    work.wait(host=True)
    report(kind=current_gpu("hip").kind, was_done=was_done, last=last, result=x.numpy().tolist())
    world.close()


class Interface:
    """Of an array that has nothing else, as those of some libraries."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    @property
    def __cuda_array_interface__(self):
        return self.array.__cuda_array_interface__


def reduce_an_interface_with_hip(backend):
    """Of the default stream and of another one, and with two dimensions."""
    library, stream, ones = runtime(hip=True), ctypes.c_void_p(), np.ones((2, 3), "float32")
    dist.init_process_group(backend, init_method=store(), rank=rank, world_size=size, timeout=20.0)
    assert library.hipStreamCreateWithFlags(ctypes.byref(stream), 0) == 0
    for handle in (0, stream.value):
        x = DeviceArray(current_gpu("hip"), "float32", ones.shape, stream=handle)
        address = ctypes.c_void_p(x.__cuda_array_interface__["data"][0])
        at = ctypes.c_void_p(ones.ctypes.data), ones.nbytes, 4, ctypes.c_void_p(handle)
        assert library.hipMemcpyAsync(address, *at) == 0
        ss.get_distributed_backend().allreduce(Interface(x))
        dist.all_reduce(Interface(x))
        report(result=x.numpy().tolist())
    dist.destroy_process_group()


def read_device_memory():
    array = Array.of(np.ones(3))
    report(alive=True)
    ctypes.string_at(array.address, 1)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

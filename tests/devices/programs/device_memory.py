"""Programs of test_device_memory.py: device memory while other threads of Python have work to do."""

import ctypes
import faulthandler
import gc
import json
import sys
import threading

import numpy as np
from device_rank import rank, release_soon, report, size, start
from fake_arrays import Array, Stream, counts, longest_copy, runtime, slow_calls
from samestep.gpu import runtime as gpus
from samestep.gpu.device_array import DeviceArray


def free_while_the_device_is_busy():
    """To free memory waits for the device, which here continues only once another thread of Python has run."""
    stream = Stream()
    array = DeviceArray(gpus.current_gpu(), "float32", (1000,))
    runtime().fakeHold(stream.handle)
    frees = threading.Event()

    def release():
        frees.wait()
        runtime().fakeRelease(stream.handle)

    thread = threading.Thread(target=release)
    thread.start()
    frees.set()
    del array
    thread.join()
    report(ended=True)


def drop_a_group_while_the_device_is_busy():
    """It has pinned memory, and to unpin that waits for the device, too."""
    faulthandler.dump_traceback_later(20, exit=True)
    world, x = start("native"), Array.of(np.ones(1000), Stream())
    group = world.split(0)
    group.allreduce(x)
    x.stream.synchronize()
    group.close()
    x.stream.hold()
    release_soon(x.stream)
    pinned = counts()[1]
    del group
    gc.collect()
    report(pinned=[pinned, counts()[1]])
    world.close()


def move_longer_and_longer_arrays(backend):
    """In exchanges, for which NCCL needs a copy, and in trees, whose small leaves the host path packs on the device.

    All wait on the host: what is behind an operation whose end nobody has seen keeps its memory until the thread that
    watches the device sees it, which may be late.
    """
    world, x = start(backend), Array.of(np.zeros(11_000, "f4"), Stream())
    blocks = []
    for n in range(10_000, 10_400, 20):
        longer = x.part(0, n)
        world.alltoall(longer, out=longer, timeout=60)
        world.allreduce_tree({"a": longer, "b": x.part(n, n + 10)}, timeout=60)
        blocks.append(counts()[0])
    report(blocks=blocks[-1] - blocks[0])
    world.close()


def reduce_arrays_again_and_again_after_others():
    """Pinned memory of the lengths that do not return is more than the cache keeps."""
    world, x = start("native"), Array.of(np.zeros(1 << 20, "f4"), Stream())
    for n in range(1 << 17, 7 << 17, 12_000):
        world.allreduce(x.part(0, n))
    for _ in range(3):
        world.allreduce(x)
    before = slow_calls().pinned
    for _ in range(10):
        world.allreduce(x)
    report(pinned=slow_calls().pinned - before)
    world.close()


class Managed(ctypes.Structure):
    """DLManagedTensor, but for what lies in it."""

    _fields_ = (("tensor", ctypes.c_char * 48), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


def keep_an_array_until_the_process_ends():
    """As a consumer whose threads outlive Python, such as XLA: it drops the array when the process exits."""
    capsule = DeviceArray(gpus.current_gpu(), "float32", (1000,)).__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, b"dltensor")
    ctypes.pythonapi.PyCapsule_SetName(ctypes.py_object(capsule), b"used_dltensor")
    deleter = Managed.from_address(address).deleter
    at_exit = ctypes.CDLL(None).__cxa_atexit
    at_exit.argtypes = [ctypes.c_void_p] * 3
    assert at_exit(deleter, address, None) == 0
    report(ended=True)


def copy_in_segments(sizes):
    """The longest copy of a reduction and of a gathering, by the bytes that they move."""
    world = start("native")
    for nbytes in sizes:
        x = Array.of(np.ones(nbytes, "uint8"), Stream())
        rows = Array.of(np.ones((size, nbytes // size), "uint8"), Stream())
        x.stream.synchronize()
        rows.stream.synchronize()
        longest_copy()
        world.allreduce(x, "max", timeout=20.0)
        reduced = longest_copy()
        world.alltoall(rows, out=rows, timeout=20.0)
        report(reduced=reduced, exchanged=longest_copy())
    world.close()


def stage_while_nccl_waits():
    """Rank 0 has an operation in NCCL that rank 1 comes to after many that go through the host, more than 64 MiB."""
    world = start(timeout=40.0)
    group, stream = world.split(0), Stream()
    x = Array.of(np.ones(1000, "float32"), Stream())
    group.allreduce(x)
    many = [Array.of(np.ones(1 << 20, "int32"), stream) for _ in range(40)]
    stream.synchronize()
    world.allreduce(Array.of(np.ones(10, "int32"), stream), "bxor")

    def stage():
        works = [world.iallreduce(y, "bxor") for y in many]
        for work in reversed(works):
            work.wait(host=True)

    for _ in range(2):
        works = [group.iallreduce(x)] if rank == 0 else []
        stage()
        works += [group.iallreduce(x)] if rank != 0 else []
        works[0].wait(host=True)
    report(pinned=counts()[1] > 0)
    world.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

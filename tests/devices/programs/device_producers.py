"""Programs of test_producers.py: arrays of libraries that name their streams otherwise than torch and CuPy."""

import ctypes
import json
import sys
import types
from unittest import mock

import fake_torch
import numpy as np
from device_rank import rank, report, start
from fake_arrays import DEFAULT, Array, DLPackArray, Stream, runtime
from foreign_arrays import FLOAT32, ManagedVersioned, Tensor, new_capsule
from samestep import arrays

CUDA = 2
Export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
CurrentStream = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)


class ArrayWithoutStream:
    """As Numba has it: None stands for the default stream."""

    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": None}


class ExchangeApi(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("export_managed", Export),
        ("import_managed", ctypes.c_void_p),
        ("borrow", ctypes.c_void_p),
        ("current_stream", CurrentStream),
    ]


asked = []  # devices whose current stream was asked for
current = []


@Export
def export(x, out):
    out[0] = ctypes.addressof(x.managed)
    return 0


@CurrentStream
def current_stream(device_type, index, out):
    asked.append((device_type, index))
    out[0] = current[0].handle
    return 0


TABLE = ExchangeApi(1, 3, None, None, export, None, None, current_stream)


class ExchangedArray:
    """As tvm-ffi has it: exported without synchronization, in whichever stream is the library's current one."""

    __dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(TABLE), b"dlpack_exchange_api", None)

    def __init__(self, array, device):
        self.array = array
        self.shape = (ctypes.c_int64 * 1)(*array.shape)
        tensor = Tensor(array.address, CUDA, device, 1, *FLOAT32, self.shape, None, 0)
        self.managed = ManagedVersioned(1, 0, None, None, 0, tensor)

    def __dlpack__(self, **_):
        raise AssertionError("the slow path was taken")


def late(stream):
    """Elements that were -1 for long."""
    array = Array.of(np.full(5, -1.0, "float32"), stream)
    stream.synchronize()
    stream.delay(100_000)
    array.set(np.full(5, rank + 1.0, "float32"))
    return array


def reduce_an_array_of_the_default_stream(backend):
    world = start(backend)
    array = late(DEFAULT)
    work = world.iallreduce(ArrayWithoutStream(array))
    work.wait()
    report(ended=work.done(), result=array.get().tolist())
    world.close()


def reduce_an_array_that_a_blocking_stream_makes(backend):
    world = start(backend)
    stream = Stream()
    x, y = (Array.of(np.full(5, value, "float32"), stream) for value in (-1.0, -2.0))
    reduce_late(world, x, y, ArrayWithoutStream)


def reduce_an_array_with_dlpack_only(backend):
    """Its library makes it in a stream that the default stream does not wait for, unless it is asked to."""
    world = start(backend)
    stream = Stream(blocking=False)
    x, y = (DLPackArray.of(np.full(5, value, "float32"), stream) for value in (-1.0, -2.0))
    reduce_late(world, x, y, lambda array: array)


def reduce_a_tensor_of_torch_without_raw_streams(backend):
    """As of a torch whose private functions have changed."""
    reduce_a_tensor_of_torch(backend, with_raw_streams=False)


def reduce_a_tensor_of_torch(backend, *, with_raw_streams=True):
    """In torch's current stream, which has nothing to do with the default stream."""
    fake_torch.install(with_raw_streams=with_raw_streams)
    world = start(backend)
    fake_torch.set_stream(Stream(blocking=False))
    x, y = (fake_torch.tensor(np.full(5, value, "float32")) for value in (-1.0, -2.0))
    x.stream.synchronize()
    runtime().fakeHoldWrites(1)  # of the package, until the current stream can do no more
    world.iallreduce(x, out=y).wait()
    found = np.zeros(5, "float32")
    y._copy(found.ctypes.data, y.address)
    runtime().fakeRunUnblocked()
    runtime().fakeHoldWrites(0)
    y.stream.synchronize()
    report(used=found.tolist())
    reduce_late(world, x, y, lambda array: array)


class ArrayOfCupyWithoutInterface(DLPackArray):
    """As CuPy's for ROCm before version 14. It is exported in the order of CuPy's current stream only."""

    def __dlpack__(self, *, stream=None, max_version=None):
        assert stream == -1
        return super().__dlpack__(stream=-1, max_version=max_version)


ArrayOfCupyWithoutInterface.__module__ = "cupy.stand_in"


def reduce_an_array_of_cupy_without_the_interface(backend):
    cupy, stream = types.ModuleType("cupy"), Stream(blocking=False)
    cupy.ndarray = ArrayOfCupyWithoutInterface
    current = types.SimpleNamespace(ptr=stream.handle)
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: current, Device=mock.Mock())
    sys.modules["cupy"] = cupy
    world = start(backend)
    x, y = (ArrayOfCupyWithoutInterface.of(np.full(5, v, "float32"), stream) for v in (-1.0, -2.0))
    report(library=arrays.of(x).name)
    reduce_late(world, x, y, lambda array: array)


def reduce_late(world, x, y, given):
    """From `x`, which is made late, into `y`, in a group of one, whose operations wait for no other process."""
    x.stream.synchronize()
    x.stream.hold()
    x.set(np.full(5, 1.0, "float32"))
    work = world.iallreduce(given(x), out=given(y))
    runtime().fakeRunUnblocked()  # whatever does not wait for the stream has run by now
    early = work.done()
    x.stream.release()
    work.wait(host=True)
    report(early=early, result=y.get().tolist())
    world.close()


def reduce_an_array_of_the_current_stream(backend):
    world = start(backend)
    current.append(Stream())
    array = late(current[0])
    world.allreduce(ExchangedArray(array, world.device))
    report(asked=set(asked) == {(CUDA, world.device)}, result=array.get().tolist())
    world.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

"""Programs of test_device_memory.py: device memory while other threads of Python have work to do."""

import ctypes
import json
import sys
import threading

from device_rank import report
from fake_arrays import Stream, runtime
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


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

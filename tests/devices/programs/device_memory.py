"""Programs of test_device_memory.py: device memory while other threads of Python have work to do."""

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


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

"""Programs of test_streams.py: arrays that streams make late, and calls that do not wait for them."""

import json
import sys

import numpy as np
import samestep as ss
from device_rank import rank, release_soon, report, size, start
from fake_arrays import Array, Stream


def reduce_late_arrays(backend, n_turns):
    """Each array is made late in its own stream and used at once; its value before that is -1."""
    backend = start(backend)
    wrong = 0
    for turn in range(n_turns):
        streams = [Stream() for _ in range(3)]
        arrays = []
        for i, stream in enumerate(streams):
            x, y = Array((257,), "float32", stream), Array((257,), "float32", stream)
            for a in (x, y):
                a.set(np.full(257, -1.0, "float32"))
            stream.synchronize()
            stream.delay(2000)
            x.set(np.full(257, turn + i, "float32"))
            arrays.append((x, y))
        works = [backend.iallreduce(x, ss.premul(2.0), out=y) for x, y in arrays]
        works += [backend.iallreduce(x, ss.premul(2.0)) for x, _ in arrays]
        for work in works:
            work.wait()
        for i, (x, y) in enumerate(arrays):
            expected = np.full(257, 2.0 * (turn + i) * size, "float32")
            wrong += int((y.get() != expected).any()) + int((x.get() != expected).any())
    report(wrong=wrong)
    backend.close()


def call_while_the_device_is_busy():
    backend = start()
    stream = Stream()
    x = Array.of(np.ones(100, "float32"), stream)
    backend.allreduce(x)
    stream.hold()  # a call that waits for the device does not return
    works = [backend.iallreduce(x) for _ in range(10)]
    for work in works:
        work.wait()
    backend.allreduce(x)
    report(ended=works[-1].done())
    released = release_soon(stream)
    works[-1].wait(host=True)
    report(late=released.is_set(), ended=works[-1].done())
    report(result=float(x.get()[0]))
    backend.close()


class ArrayWithoutStream:
    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": None}


def reduce_without_a_stream():
    backend = start()
    array = Array.of(np.full(5, rank + 1.0), Stream())
    array.stream.synchronize()
    work = backend.iallreduce(ArrayWithoutStream(array))
    work.wait()
    report(ended=work.done(), result=array.get().tolist())
    backend.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

"""Programs of test_streams.py: arrays that streams make late, and calls that do not wait for them."""

import ctypes
import json
import sys
import threading

import fake_torch
import numpy as np
import samestep as ss
from device_rank import rank, release_soon, report, size, start
from fake_arrays import DEFAULT, Array, Stream, call, runtime
from samestep.gpu import runtime as gpus
from samestep.gpu.device_array import DeviceArray


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


def read(array, found, stream):
    """Begins a copy to the host, in `stream`."""
    places = ctypes.c_void_p(found.ctypes.data), ctypes.c_void_p(array.__cuda_array_interface__["data"][0])
    call("MemcpyAsync", *places, ctypes.c_size_t(found.nbytes), 4, ctypes.c_void_p(stream.handle))


def hand_a_late_result_on():
    """What consumers read in their streams, first while the result is not there yet."""
    backend = start()
    x = Array((5,), "float32", Stream(blocking=False))
    consumers = [(x.stream, x.stream.handle), (other := Stream(blocking=False), other.handle)]
    consumers += [(DEFAULT, None), (Stream(blocking=False), -1)]
    for stream, name in consumers:
        x.set(np.full(5, 3.0, "float32"))
        y = backend.allgather(x, timeout=20)
        with x.stream.held():
            x.set(np.full(5, 7.0, "float32"))
            backend.allgather(x, out=y)
            y.__dlpack__(stream=name)
            found = np.full(5, -1.0, "float32")
            read(y, found, stream)
            runtime().fakeRunUnblocked()  # whatever does not wait for the stream has run by now
            early = float(found[0])
        stream.synchronize()
        report(early=early, result=float(found[0]))
    backend.close()


def export_for_streams(kind, streams):
    """Which numbers of streams are refused."""
    gpu = gpus.current_gpu(kind)
    array, refused = DeviceArray(gpu, "float32", (5,), stream=gpu.make_stream(0)), []
    for stream in streams:
        try:
            array.__dlpack__(stream=stream)
        except BufferError:
            refused.append(stream)
    report(refused=refused)


def drop_what_was_waited_for(backend):
    """The runtime does not answer meanwhile."""
    backend = start(backend)
    x = Array.of(np.ones(100, "float32"), Stream())
    backend.allreduce(x)
    works = [backend.iallreduce(x)]
    works[0].wait()
    library = runtime()
    library.fakeHoldQueries(1)
    library.fakeHoldLooks(1)
    dropping = threading.Thread(target=works.clear)
    dropping.start()
    dropping.join(20)
    report(dropped=not dropping.is_alive())
    library.fakeHoldQueries(0)
    library.fakeHoldLooks(0)
    dropping.join()
    backend.close()


def reduce_in_the_per_thread_stream(backend):
    """Which is another one in the thread that makes the first call of a verb, and of each length."""
    world = start(backend)
    stream = Stream(2)
    for count in (3, 3, 5):
        x, y = (Array.of(np.full(count, -1.0), stream) for _ in range(2))
        stream.synchronize()
        stream.delay(100_000)  # no other thread can name it to hold and release it
        x.set(np.full(count, rank + 1.0))
        y.set(np.full(count, rank + 1.0))
        world.allreduce(x)
        world.iallreduce(y).wait()
        report(x=x.get().tolist(), y=y.get().tolist())
    world.close()


def use_what_an_operation_writes_in_another_stream(backend):
    """By another array of the same memory. What the package copies to the device is there only after the call."""
    world = start(backend)
    library = runtime()

    def behind(call):
        own, other = Stream(blocking=False), Stream(blocking=False)
        x = Array.of(np.full(9, rank + 1.0), own)
        view, result = x.part(0, 9), Array.of(np.zeros(9), other)
        view.stream = other
        own.synchronize()
        other.synchronize()
        library.fakeHoldWrites(1)
        threading.Timer(0.3, library.fakeHoldWrites, [0]).start()
        work = world.iallreduce(x)
        found = call(view, result)
        report(result=found.get().tolist())
        work.wait()

    def send_on(view, result):
        sent = world.isend(view, (rank + 1) % size)
        world.recv(result, (rank - 1) % size)
        sent.wait()
        return result

    behind(lambda view, _: world.allreduce(view))
    behind(lambda view, _: world.iallreduce(view).wait())
    behind(lambda view, result: world.allreduce(view, "max", out=result))
    behind(lambda view, _: world.allreduce_tree([view])[0])
    behind(lambda view, _: ss.synchronize(world, [view])[0])
    behind(send_on)
    world.close()


def wait_for_an_average_in_another_stream(verb):
    """Its memory for float32 is that of the first stream, which then gives it to others."""
    fake_torch.install()
    world = start("nccl")
    for _ in range(3):  # the first connects, which takes the host's time
        first, other = Stream(blocking=False), Stream(blocking=False)
        fake_torch.set_stream(first)
        x = fake_torch.tensor(np.full(1000, rank + 1.0, "float16"))
        first.synchronize()
        work = getattr(world, verb)(x, "avg")
        fake_torch.set_stream(other)
        x.stream = other
        other.delay(20_000)
        work.wait()
        del work
        fake_torch.set_stream(first)
        owners = [fake_torch.tensor(np.full(1000, 1e6, "float32")) for _ in range(2)]
        first.synchronize()
        report(result=np.unique(x.get()).tolist())
        del owners
    world.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

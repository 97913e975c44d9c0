"""Programs of test_full_queues.py: calls that the runtime blocks, since a stream is full or the driver is busy."""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time

import fake_arrays
import numpy as np
import samestep as ss
import samestep.distributed as dist
from device_rank import attempt, rank, release_soon, report, start
from fake_arrays import Array, Stream


class Ticks:
    """Counts in a thread of Python, which needs the GIL for each."""

    def __init__(self):
        self.n = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._count)
        self._thread.start()

    def _count(self):
        while not self._ending.wait(0.01):
            self.n += 1

    def end(self):
        self._ending.set()
        self._thread.join()


def call_behind_a_kernel_that_waits_for_a_peer(n_calls):
    """Rank 1 calls no collective, so that the first one of rank 0 ends no earlier than at its deadline."""
    world = start(timeout=4.0)
    x = Array.of(np.full(3, rank + 1.0), Stream())
    x.stream.synchronize()
    if rank == 1:
        attempt(lambda: world.recv(np.zeros(1), 0, timeout=30))
        return
    ticks = Ticks()
    during = []

    def call():
        begin = ticks.n
        try:
            for _ in range(n_calls):
                work = world.iallreduce(x)
            work.wait(host=True)
        finally:
            during.append(ticks.n - begin)

    attempt(call)
    ticks.end()
    report(others_ran=during[0] > 20)
    attempt(lambda: world.allreduce(x) and None)


def fill_the_stream_of_the_arrays():
    """While one thread is blocked by a full stream, another one waits until its deadline, and lets the stream go on."""
    world = start("native")
    x, y = (Array.of(np.full(3, rank + 1.0), stream) for stream in (Stream(), Stream()))
    x.stream.synchronize()
    y.stream.synchronize()
    fake_arrays.runtime().fakeHold(ctypes.c_void_p(y.stream.handle))
    fake_arrays.runtime().fakeHold(ctypes.c_void_p(x.stream.handle))
    first = world.iallreduce(y)

    def wait():
        attempt(lambda: first.wait(timeout=0.5) and None)
        fake_arrays.runtime().fakeRelease(ctypes.c_void_p(x.stream.handle))
        fake_arrays.runtime().fakeRelease(ctypes.c_void_p(y.stream.handle))

    thread = threading.Thread(target=wait)
    thread.start()
    works = [world.iallreduce(x, "max") for _ in range(1200)]
    thread.join()
    for work in works:
        work.wait(host=True)
    report(result=x.get().tolist(), first=y.get().tolist())
    world.close()


def receive_more_than_a_stream_takes():
    """What has arrived is copied into a stream that the user's holds up."""
    world = start("native")
    stream = Stream()
    x = Array.of(np.arange(1100.0), stream)
    stream.synchronize()
    if rank == 0:
        works = [world.isend(x.part(i, i + 1), 1, i) for i in range(1100)]
    else:
        got = Array.of(np.zeros(1100), stream)
        fake_arrays.runtime().fakeHold(ctypes.c_void_p(stream.handle))
        works = [world.irecv(got.part(i, i + 1), 0, i) for i in range(900)]
        attempt(lambda: works[-1].wait(timeout=0.2) and None)
        fake_arrays.runtime().fakeRelease(ctypes.c_void_p(stream.handle))
        works += [world.irecv(got.part(i, i + 1), 0, i) for i in range(900, 1100)]
    for work in works:
        work.wait(host=True)
    if rank == 1:
        report(right=bool((got.get() == np.arange(1100.0)).all()))
    world.close()


@contextlib.contextmanager
def held(control):
    """Calls of the runtime block within it until a thread of Python has had five turns. Reports whether it had them."""
    runtime, ticks = fake_arrays.runtime(), Ticks()
    turned = threading.Event()

    def release():
        begin = ticks.n
        while ticks.n < begin + 5:
            time.sleep(0.01)
        turned.set()
        getattr(runtime, control)(0)

    getattr(runtime, control)(1)
    thread = threading.Thread(target=release)
    thread.start()
    yield turned
    report(others_ran=turned.is_set())
    thread.join()
    ticks.end()


def ask_a_runtime_that_blocks(backend):
    """With the GIL none of these calls would return: what they wait for comes from a thread of Python."""
    faulthandler.dump_traceback_later(20, exit=True)
    world = start(backend)
    stream = Stream()
    x = Array.of(np.full(3, rank + 1.0), stream)
    world.iallreduce(x).wait(host=True)
    stream.hold()
    work = world.iallreduce(x)
    with held("fakeHoldQueries") as turned:
        while not turned.is_set():
            work.done()  # looks at the device only while no thread of the package does
    with held("fakeHoldQueries") as turned:
        attempt(lambda: work.wait(timeout=0.01) and None)  # the same
        turned.wait()
    stream.release()
    work.wait(host=True)
    with held("fakeHoldLooks"):
        work = world.iallreduce(x)
    work.wait(host=True)
    with held("fakeHoldLooks"):
        world.allreduce_tree({"a": x})
    with held("fakeHoldLooks"):
        world.same({"a": x})
    with held("fakeHoldLooks"):
        world.bcast(x, out=Array.of(np.zeros(3), stream))
    report(result=x.get().tolist())
    world.close()


def send_while_the_runtime_blocks():
    """Messages of host memory behind one of device memory that is still computed."""
    faulthandler.dump_traceback_later(20, exit=True)
    world = start("native")
    stream = Stream()
    x = Array.of(np.full(3, rank + 1.0), stream)
    stream.synchronize()
    stream.hold()
    works = [world.isend(x, 1 - rank, 1)]
    with held("fakeHoldQueries"):
        works.append(world.isend(np.full(3, 7.0), 1 - rank, 1))
    with held("fakeHoldQueries"):
        works[1].done()
    asks = threading.Thread(target=works[0].done)
    with held("fakeHoldQueries"):
        asks.start()
        while fake_arrays.runtime().fakeHeldQueries() == 0:
            time.sleep(0.001)
        works.append(world.isend(np.full(3, 8.0), 1 - rank, 2))
    asks.join()
    stream.release()
    got = []
    for tag in (1, 1, 2):
        out = np.zeros(3)
        world.recv(out, 1 - rank, tag)
        got.append(out[0])
    for work in works:
        work.wait(host=True)
    report(result=got)
    world.close()


def store_into_arrays_of_a_held_stream(verb):
    """What has arrived cannot be copied to rank 1's device."""
    faulthandler.dump_traceback_later(20, exit=True)
    world = start("native")
    ready, busy = Stream(), Stream()
    x, y = (Array.of(np.full(3, rank + 1.0), ready) for _ in range(2))
    outs = [[Array.of(np.zeros(3), busy) for _ in range(4)] for _ in range(2)]
    short = [Array.of(np.zeros(3), busy) for _ in range(2)]
    ready.synchronize()
    busy.synchronize()
    calls = {
        "all_gather_multigpu": lambda: dist.all_gather_multigpu(outs, [x, y]),
        "broadcast_multigpu": lambda: dist.broadcast_multigpu(short if rank == 1 else [x, y], 0),
    }
    world._timeout = 1.0 if rank == 1 else 15.0
    if rank == 1:
        busy.hold()
    attempt(calls[verb])
    busy.release()


def end_a_group_while_the_runtime_blocks(how):
    """`how`: "abandon" or "revoke". The end asks about the copies of a staged operation, which waits for the stream."""
    faulthandler.dump_traceback_later(20, exit=True)
    world = start("native")
    stream = Stream()
    x, y = Array.of(np.full(3, rank + 1.0), stream), Array.of(np.zeros(3), stream)
    world.barrier()
    stream.hold()
    received, reduced = world.irecv(y, 1 - rank), world.iallreduce(x)
    with held("fakeHoldQueries"):
        asks = threading.Thread(target=reduced.done)
        asks.start()
        while fake_arrays.runtime().fakeHeldQueries() == 0:
            time.sleep(0.001)
        received._inner.cancel()  # waits for the thread that asks
    asks.join()
    with held("fakeHoldQueries"):
        getattr(world._comm, how)("the test", 0)
    stream.release()


def add_gradients_of_a_held_stream():
    """A thread of Python releases it."""
    faulthandler.dump_traceback_later(20, exit=True)
    world = start("native")
    stream = Stream()
    x = Array.of(np.full(3, rank + 1.0), stream)
    total = ss.Accumulator(world, shards=world.size)
    stream.hold()
    release_soon(stream)
    total.add({"w": x}, shard=rank)
    report(mean=total.mean()["w"].numpy().tolist())
    world.close()


def copy_leaves_of_a_held_stream(what):
    """That of rank 0 holds up what would be copied to the host."""
    faulthandler.dump_traceback_later(20, exit=True)
    world = start("native")
    stream = Stream()
    x, y = (Array.of(np.full(3, rank + 1.0), stream) for _ in range(2))
    stream.synchronize()
    world.barrier()
    calls = {
        "allreduce_tree": lambda timeout: world.allreduce_tree({"a": x, "b": y}, timeout=timeout),
        "synchronize": lambda timeout: ss.synchronize(world, {"a": x, "b": y}, timeout=timeout),
        "same": lambda timeout: world.same({"a": x}, timeout=timeout),
        "allreduce_gradients": lambda timeout: ss.allreduce_gradients(
            world, {"a": x}, weight=1.0, timeout=timeout
        ),
    }
    if rank == 0:
        stream.hold()
    attempt(lambda: calls[what](1.0 if rank == 0 else 15.0) and None)
    attempt(world.barrier)
    stream.release()


def interrupt_a_copy():
    """The stream is never released."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell starts what is in its background without one
    faulthandler.dump_traceback_later(20, exit=True)
    total = ss.Accumulator(start("native"), shards=1)
    x = Array.of(np.ones(3), Stream())
    x.stream.hold()
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        total.add({"a": x}, shard=0)
    except KeyboardInterrupt:
        report(interrupted=True)
    x.stream.release()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

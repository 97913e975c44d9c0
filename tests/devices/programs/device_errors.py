"""Programs of test_device_errors.py: errors of the runtime, and arrays that cannot be used."""

import ctypes
import gc
import json
import os
import sys
import time
import weakref
from pathlib import Path

import fake_arrays
import numpy as np
import samestep as ss
from device_rank import attempt, folder, rank, report, start, use_only
from fake_arrays import Array, Graph, Stream


def fail_for_good(backend, code):
    """The device of rank 0 fails while an operation is in progress, as after an illegal access of a kernel."""
    world = start(backend, timeout=30.0)
    stream = Stream()
    x = Array.of(np.full(7, rank + 1.0), stream)
    stream.synchronize()
    if rank == 0:
        assert fake_arrays.runtime().fakeHold(ctypes.c_void_p(stream.handle)) == 0
    work = world.iallreduce(x)
    if rank == 0:
        fake_arrays.runtime().fakeFail(code)
    attempt(lambda: work.wait(host=True) and None)
    attempt(lambda: world.allreduce(x) and None)
    told = Path(folder, "told")
    if rank == 1:
        told.touch()
    while not told.exists():  # else the operation could end well before rank 1 has looked
        time.sleep(0.001)
    fake_arrays.runtime().fakeFail(0)
    fake_arrays.runtime().fakeRelease(ctypes.c_void_p(stream.handle))


def leave_no_error_behind(backend):
    """Among calls of all kinds, also some that fail."""
    world = start(backend)
    stream = Stream()
    x = Array.of(np.full(5000, 1.0), stream)
    stream.delay(20_000)
    world.iallreduce(x).wait(host=True)
    attempt(lambda: world.allreduce(x, out=Array((8,), "float64")) and None)
    world.bcast(np.ones(3))
    report(last=fake_arrays.runtime().cudaPeekAtLastError())
    world.close()


def wait_once_the_stream_has_gone(backend):
    """For an operation that has ended, and for one that has failed, since ranks differ."""
    world = start(backend, timeout=30.0)
    for count in (5, 5 + rank):
        stream = Stream()
        x = Array.of(np.ones(count, "float32"), stream)
        work = world.iallreduce(x)
        while not work.done():
            time.sleep(0.001)
        fake_arrays.call("StreamDestroy", ctypes.c_void_p(stream.handle))
        attempt(lambda work=work: work.wait() is not None)
        x.stream = fake_arrays.DEFAULT  # where its memory is freed
        x._place = (x._place[0], None, x._place[2])


def drop_the_array_of_a_mismatch(backend):
    """Whether it is kept while a kernel of the user holds the device up, and when that has ended.

    Rank 1 may hear of the mismatch in its call, before it launches anything.
    """
    world = start(backend)
    stream = Stream()

    def fail():
        x = Array.of(np.ones(7 + rank), stream)
        stream.synchronize()
        fake_arrays.runtime().fakeHold(ctypes.c_void_p(stream.handle))
        if rank == 0:
            work = world.iallreduce(x)
            world.send(np.ones(1), 1)
            attempt(lambda: work.wait(host=True) and None)
        else:
            world.recv(np.empty(1), 0)  # rank 0 has launched
            attempt(lambda: world.iallreduce(x).wait(host=True) and None)
        return weakref.ref(x)

    array = fail()
    gc.collect()
    held = array() is not None
    fake_arrays.runtime().fakeRelease(ctypes.c_void_p(stream.handle))
    deadline = time.monotonic() + 20
    while array() is not None and time.monotonic() < deadline:
        sent = world.isend(np.ones(1), rank)  # any operation that ends
        world.recv(np.empty(1), rank)
        sent.wait()
    report(held=held, kept=array() is not None)


def end_while_an_abort_waits_for_the_device(ending):
    """The stream that holds the device up never goes on. The second operation fails."""
    world = start()
    x, busy = Array.of(np.full(7, rank + 1.0), Stream()), Stream()
    world.allreduce(x)
    x.stream.synchronize()
    busy.hold()
    attempt(lambda: world.iallreduce(x).wait(host=True) and None)
    deadline = time.monotonic() + 20
    while not (blocked := fake_arrays.drains()) and fake_arrays.nccl_comms() and time.monotonic() < deadline:
        time.sleep(0.001)
    report(blocked=blocked > 0)
    if ending == "close":
        attempt(lambda: world.close(timeout=0.1))
    report(time=time.monotonic())
    if ending == "raise":
        raise KeyError("of the program")


def end_while_an_operation_waits_for_the_device(backend):
    world = start(backend)
    x = Array.of(np.full(7, rank + 1.0), Stream())
    x.stream.synchronize()
    x.stream.hold()
    kept.append(world.iallreduce(x))
    report(done=kept[0].done(), time=time.monotonic())


kept = []  # until Python ends: who drops an operation waits for it


class Typed:
    """Elements of a type that NCCL and the package lack."""

    def __init__(self, array, typestr):
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "typestr": typestr}


def give_unusable_arrays(backend):
    """On all ranks alike, after which the group continues."""
    world = start(backend)
    x = Array.of(np.full(7, rank + 1.0), Stream())
    elsewhere, freed = unusable_arrays(world, x.stream)
    attempt(lambda: world.allreduce(elsewhere) and None)
    attempt(lambda: world.allreduce(freed) and None)
    attempt(lambda: world.allreduce(x, out=np.ones(7)) and None)
    attempt(lambda: world.allreduce(np.ones(7), out=x) and None)
    attempt(lambda: world.allreduce(Typed(x, "<V8")) and None)
    attempt(lambda: world.isend(elsewhere, 1) and None)
    freed.address = 0
    report(result=world.allreduce(x).get().tolist())
    world.close()


def unusable_arrays(world, stream):
    """Seven numbers on another device, and seven that have been freed."""
    use_only(-1)
    fake_arrays.call("SetDevice", 3)
    elsewhere = Array.of(np.ones(7))
    fake_arrays.call("SetDevice", world.device)
    freed = Array.of(np.ones(7), stream)
    freed.get()
    fake_arrays.call("Free", ctypes.c_void_p(freed.address))
    return elsewhere, freed


def give_unusable_leaves(backend):
    """On all ranks alike, among leaves that can be used."""
    world = start(backend)
    x = Array.of(np.full(7, rank + 1.0), Stream())
    elsewhere, freed = unusable_arrays(world, x.stream)
    for bad in (elsewhere, freed):
        attempt(lambda bad=bad: world.allreduce_tree({"a": x, "b": bad}) and None)
        attempt(lambda bad=bad: ss.synchronize(world, {"a": x, "b": bad}) and None)
    attempt(lambda: world.same({"a": x, "b": freed}) and None)
    freed.address = 0
    y = Array.of(np.full(7, 10.0), x.stream)
    tree = world.allreduce_tree({"a": x, "b": y})
    report(result=world.allreduce(x).get().tolist(), tree=[tree["a"] is x, tree["b"].get().tolist()])
    world.close()


def exchange_lengths_with_unusable_arrays(backend):
    """On all ranks alike; what root is refused in a scatter, the others hear of."""
    world = start(backend)
    x, out = Array.of(np.full(7, rank + 1.0), Stream()), Array.of(np.zeros(7), Stream())
    rows = Array.of(np.arange(14.0).reshape(2, 7), x.stream)
    elsewhere, freed = unusable_arrays(world, x.stream)
    for bad in (elsewhere, freed):
        attempt(lambda bad=bad: world.allgatherv(bad) and None)
        attempt(lambda bad=bad: world.gatherv(bad, root=1) and None)
        attempt(lambda bad=bad: world.alltoallv(bad, [3, 4]) and None)
    attempt(lambda: world.allgatherv(x, out=np.ones(14)) and None)
    x.stream.synchronize()
    if backend == "native":  # what is of NCCL becomes part of the graph
        with Graph(x.stream):
            attempt(lambda: world.allgatherv(x) and None)
            attempt(lambda: world.scatter(rows if rank == 0 else None) and None)
    attempt(lambda: world.scatterv(*([elsewhere, [3, 4]] if rank == 0 else [])) and None)
    freed.address = 0
    report(result=world.allgatherv(x).numpy().tolist(), row=world.scatter(rows, out=out).get().tolist())
    world.close()


def exchange_through_secret_pinned_memory():
    """`pinned`: whether operations have taken such memory, as they must where none of theirs can be registered."""
    mine = ctypes.c_void_p()
    code = fake_arrays.runtime().cudaHostAlloc(ctypes.byref(mine), ctypes.c_size_t(4096), 1)
    if code != 0:
        report(skip="no memfd_secret")
        return
    hidden = not is_readable(mine.value)
    fake_arrays.call("FreeHost", mine)
    shared = np.zeros(512)
    registered = fake_arrays.runtime().cudaHostRegister(
        ctypes.c_void_p(shared.ctypes.data), ctypes.c_size_t(shared.nbytes), 1
    )
    world = start("native", only=False)
    x = Array.of(np.full(30_000, rank + 1.0), Stream())
    before = fake_arrays.slow_calls().pinned
    all_of = world.allgather(x)
    y = world.alltoall(all_of)
    report(result=float(world.allreduce(x).get().sum()), moved=float(y.numpy().sum()))
    report(hidden=hidden, registered=registered == 0, pinned=fake_arrays.slow_calls().pinned > before)
    world.close()


def is_readable(address):
    """Whether the kernel reads memory of this process for others."""
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        try:
            return len(os.pread(memory.fileno(), 1, address)) == 1
        except OSError:
            return False


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

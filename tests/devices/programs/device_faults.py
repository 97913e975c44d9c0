"""Programs of test_device_faults.py: ranks that fail, hang, die or disagree while devices work."""

import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time

import fake_arrays
import numpy as np
import samestep as ss
from device_rank import attempt, rank, report, size, start, store, use_only
from fake_arrays import Array, Stream


def initialize(timeout):
    attempt(lambda: start(timeout=timeout) and None)


def reduce_often(timeout, other_op=False, absent=False):
    """With `other_op` rank 0 changes the operator after a while; if `absent`, rank 1 does not take part."""
    initialize(timeout)
    world = ss.get_distributed_backend()
    x = Array.of(np.ones(1000, "float32"), Stream())

    def work():
        if absent and rank == 1:
            time.sleep(8)
            return
        for turn in range(20):
            op = "max" if other_op and rank == 0 and turn >= 5 else "sum"
            world.iallreduce(x, op).wait(host=True)

    attempt(work)
    attempt(lambda: world.iallreduce(x).wait(host=True))
    attempt(lambda: world.allreduce(np.ones(3)).tolist())


def lose_a_device():
    """Rank 0 holds its stream, so that the loss is found while work is in progress."""
    world = start()
    stream = Stream()
    x = Array.of(np.full(7, rank + 1.0), stream)
    stream.synchronize()
    if rank == 0:
        fake_arrays.runtime().fakeHold(ctypes.c_void_p(stream.handle))
    else:
        os.environ["FAKE_GPU_DEVICES"] = "1"
    work = world.iallreduce(x)
    attempt(lambda: work.wait(host=True))
    if rank == 0:
        fake_arrays.runtime().fakeRelease(ctypes.c_void_p(stream.handle))
    attempt(lambda: world.allreduce(x))


def give_wrong_arguments():
    world = start()
    x = Array.of(np.full(7, rank + 1.0), Stream())
    attempt(lambda: world.allreduce(x, out=Array((8,), "float64")))
    attempt(lambda: world.bcast(x, root=5))
    use_only(-1)
    fake_arrays.call("SetDevice", 3)
    there = Array.of(np.ones(7))
    fake_arrays.call("SetDevice", world.device)
    attempt(lambda: world.allreduce(there))
    attempt(lambda: world.allreduce(x).get().tolist())
    world.close()


def start_and_end_three_times():
    for turn in range(3):
        world = ss.initialize("nccl", init_method=store(f"store{turn}"), rank=rank, world_size=size)
        x = Array.of(np.ones(1000, "int16"), Stream())
        group = world.split(rank % 2)
        for op in ("sum", "bxor"):
            world.allreduce(x, op)
            group.allgather(x).numpy()
        x.get()
        stream = x.stream.handle
        del x
        ss.finalize()
        world = group = None
        gc.collect()
        fake_arrays.call("StreamDestroy", ctypes.c_void_p(stream))
        report(left=fake_arrays.counts_at_rest())


def exchange_overlapping_arrays(backend):
    """Neighbouring parts of one array, and then separate ones."""
    world = start(backend)
    whole = Array.of(np.arange(8, dtype="float32"), Stream())
    x, out = whole.part(0, 5), whole.part(3, 8)
    attempt(lambda: world.sendrecv(x, 1 - rank, out, 1 - rank))
    sent, got = (Array.of(np.full(3, value, "float32"), whole.stream) for value in (rank, -1))
    world.sendrecv(sent, 1 - rank, got, 1 - rank)
    report(result=got.get().tolist())
    world.close()


def wait_longer_than_the_group(backend, connects):
    """Rank 1 calls only when the group's timeout has passed on rank 0. `connects`: not for the first time."""
    world = start(backend, timeout=1.0)
    group = world.split(0)
    x = Array.of(np.full(7, rank + 1.0), Stream())

    def reduce():
        out = Array((7,), "float64")
        return group.allreduce(x, out=out, timeout=30).get().tolist()

    if connects:
        reduce()
    late = os.path.join(os.environ["TEST_FOLDER"], "late")
    if rank == 0:
        threading.Timer(1.5, lambda: open(late, "w").close()).start()
    while rank == 1 and not os.path.exists(late):
        time.sleep(0.01)
    attempt(reduce)


def fork_a_process(backend, drops):
    """A child that drops a group, or ends as any program does."""
    world = start(backend)
    part = world.split(0)
    x = Array.of(np.full(7, rank + 1.0), Stream())

    def reduce(group):
        out = Array((7,), "float64")
        return group.allreduce(x, out=out, timeout=30).get().tolist()

    reduce(part)
    reduce(world)
    stream = Stream()
    sent = Array.of(np.ones(3), stream)
    stream.synchronize()
    stream.hold()
    work = world.isend(sent, rank, 1)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs is killed
        if drops:
            del part
            gc.collect()
            try:
                world.send(np.ones(3), rank, 1)
            except ss.NotInitializedError:
                os._exit(0)
            os._exit(1)
        sys.exit(0)
    report(status=os.waitpid(child, 0)[1])
    stream.release()
    world.recv(np.zeros(3), rank, 1)
    work.wait(host=True)
    attempt(lambda: reduce(world))


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

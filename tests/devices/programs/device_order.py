"""Programs of test_launch_order.py."""

import os
import sys
import threading

import numpy as np
from device_rank import attempt, rank, report, size, start
from fake_arrays import Array, Stream


def ones(n, stream):
    x = Array.of(np.ones(n, "float32"), stream)
    stream.synchronize()
    return x


def known_behind_new():
    """An operation that needs connections, then one of another group that has them."""
    world = start(timeout=10.0)
    first, second = world.split(0), world.split(0)
    a, b = Stream(), Stream()
    y = ones(1000, b)
    second.allreduce(y)
    first.allreduce(ones(3, a))
    world.barrier()

    def call():
        x = ones(50_000, a)
        if rank != 0:  # rank 0 has launched what it can
            world.barrier()
        works = [first.iallreduce(x)]
        if rank != 0:
            works[0].wait()  # the operation is in the stream
        works.append(second.iallreduce(y))
        if rank == 0:
            world.barrier()
        for work in works:
            work.wait(host=True)
        return [float(x.get()[-1]), float(y.get()[-1])]

    attempt(call)
    os._exit(0)


def threads():
    """Threads that each call operations of a group of their own, which has its connections."""
    world = start()
    groups = [(world.split(0), ones(100, Stream())) for _ in range(3)]
    for group, x in groups:
        group.allreduce(x)

    def call(group, x):
        def often():
            for _ in range(200):
                group.allreduce(x, "max")

        attempt(often)

    for group, x in groups:
        group.allreduce(x, "max")
    running = [threading.Thread(target=call, args=group) for group in groups]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert all(x.get()[0] == size for _, x in groups)
    report(set_to=os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"])
    world.close()


globals()[sys.argv[1]]()

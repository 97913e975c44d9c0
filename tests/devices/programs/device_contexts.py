"""Programs of test_contexts.py."""

import asyncio
import gc
import json
import sys
import threading

import numpy as np
import samestep as ss
from device_rank import attempt, rank, size, start
from fake_arrays import DEFAULT, Array, Stream, current_device
from samestep.gpu import runtime as gpus
from samestep.gpu.device_array import DeviceArray


def calls_of_a_thread(backend):
    """A thread that has no device calls all kinds of operations."""
    world = start(backend)
    arrays = [
        Array.of(np.ones(1000, "float32"), stream) for stream in (DEFAULT, Stream(), Stream(), Stream())
    ]
    whole, late, waited, rows = arrays
    integers = Array.of(np.ones(1000, "int32"), Stream())  # of which NCCL has no bitwise operator
    right, left = (rank + 1) % size, (rank - 1) % size

    async def wait_for(work):
        await work

    def call():
        assert current_device() == 0
        made = DeviceArray(gpus.current_gpu(), "float32", (10,), device=world.device)
        world.allreduce(whole)
        work = world.iallreduce(late, ss.premul(0.5))
        while not work.done():
            pass
        work.wait()
        asyncio.run(wait_for(world.iallreduce(waited)))
        world.iallreduce(waited)  # dropped
        world.allreduce(integers, "bxor")
        results = [world.allgather(rows), world.allreduce_tree({"x": rows, "y": [late]})]
        got = world.irecv(late, left)
        world.send(waited, right)
        got.wait(host=True)
        group = world.split(0)
        group.bcast(whole, root=size - 1)
        group.close()
        del made, results, got, work, group
        gc.collect()
        world.close()
        gc.collect()

    thread = threading.Thread(target=attempt, args=(call,))
    thread.start()
    thread.join()


globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

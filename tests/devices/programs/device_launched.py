"""Programs that a launcher starts on ranks with fake devices."""

import json
import sys

import numpy as np
import samestep as ss
from fake_arrays import Array, Stream


def reduce_under_a_launcher(backend, devices=None):
    """`backend`: the name of a class."""
    for _ in range(2):
        options = {} if devices is None else {"cuda_devices": devices}
        with ss.initialize(getattr(ss, backend), **options) as world:
            got = world.allreduce(Array.of(np.full(3, world.rank + 1.0))).get().tolist()
            line = f"{world.kind} {world.rank} {world.device} {got}\n"
            sys.stdout.write(line)  # in one piece, also where it is not buffered
            sys.stdout.flush()


def call_mpi_on_device_memory(operation):
    with ss.initialize("mpi") as world:
        x = Array.of(np.ones(5000, "float32"), Stream())
        if operation == "bcast":
            world.bcast(x)
        elif world.rank == 0:
            world.send(x, 1)
        else:
            world.recv(x, 0)
        world.barrier()
        print("alive")


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

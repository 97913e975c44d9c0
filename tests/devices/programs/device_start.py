"""Programs of test_device_start.py: which device a rank gets, and what device memory is."""

import ctypes
import json
import sys

import numpy as np
import samestep as ss
from device_rank import attempt, report, start
from fake_arrays import Array


def reduce_once(backend="nccl", devices=None):
    def reduce():
        world = start(backend, **({} if devices is None else {"cuda_devices": devices}))
        return [world.kind, world.device, world.allreduce(Array.of(np.ones(3, "float32"))).get().tolist()]

    attempt(reduce)


def reduce_without_devices():
    world = start("native", cuda_devices=ss.missing)
    report(device=world.device)
    attempt(lambda: world.allreduce(Array.of(np.ones(3, "float32"))))


def read_device_memory():
    array = Array.of(np.ones(3))
    report(alive=True)
    ctypes.string_at(array.address, 1)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

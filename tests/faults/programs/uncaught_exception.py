"""Programs of test_uncaught_exception.py: a rank of an MPI job ends early."""

import json
import os
import sys
import time

import numpy as np
import samestep as ss


def raise_before_a_collective():
    world = ss.initialize("mpi", timeout=120)
    world.allreduce(np.ones(3))
    if world.rank == 1:
        raise KeyError("no such batch")
    try:
        world.allreduce(np.ones(3))
    except ss.PeerLostError as error:
        print(f"<{world.rank} {error}>", flush=True)
        raise SystemExit(3) from None


class Unprintable(Exception):
    def __str__(self):
        raise OSError


_ODD = {
    "surrogate": lambda: ValueError("bad \ud800 name"),
    "zero": lambda: ValueError("a\0b"),
    "no text": Unprintable,
    "long": lambda: ValueError("é" * 5000),
}


def raise_with_an_odd_text(which):
    world = ss.initialize(timeout=120)
    world.barrier()
    if world.rank == 1:
        raise _ODD[which]()
    try:
        world.allreduce(np.ones(3))
    except ss.PeerLostError as error:
        print(json.dumps(str(error)), flush=True)


def raise_while_others_compute():
    world = ss.initialize("mpi", timeout=120)
    world.barrier()
    if world.rank == 1:
        raise ValueError("bad value")
    end = time.monotonic() + 1.0
    while time.monotonic() < end:  # at work
        pass
    world.recv(np.empty(1), 1)


def raise_while_others_wait_in_a_group():
    world = ss.initialize("mpi", timeout=120)
    pair = world.split(world.rank // 2)
    if world.rank == 1:
        raise ValueError("bad value")
    pair.allreduce(np.ones(100_000))
    world.barrier()


def leave(how):
    world = ss.initialize("mpi", timeout=120)
    world.barrier()
    if world.rank == 1:
        if how == "sys.exit":
            sys.exit(7)
        if how == "os._exit":
            os._exit(7)
        raise KeyboardInterrupt
    world.barrier()


def end_well(application_starts_mpi, finalizes):
    if application_starts_mpi:
        from mpi4py import MPI  # noqa: F401
    world = ss.initialize()
    part = world.split(world.rank % 2)
    world.allreduce(np.ones(3))
    part.iallreduce(np.ones(3)).wait()
    if finalizes:
        ss.finalize()
    print("end", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

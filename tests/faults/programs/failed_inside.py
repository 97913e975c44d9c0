"""Programs of test_failed_inside.py: rank 1 lacks what a call needs inside, and lives on."""

import contextlib
import json
import os
import pickle
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np
import samestep as ss

if "TEST_RANK" in os.environ:
    from native_rank import report, start
else:  # under mpirun

    def start():
        return ss.initialize("mpi", timeout=30)

    def report(**found):
        print("<" + json.dumps(found) + ">", flush=True)


held = []


def lack_memory():
    """Less than a megabyte is left, wherever the allocator has kept some."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGESIZE"), -1))
    nbytes = 64 << 20
    while nbytes >= 256 << 10:
        try:
            held.append(np.empty(nbytes, np.uint8))
        except MemoryError:
            nbytes //= 2


def lack_descriptors():
    """The files stay open for as long as the process lives."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with contextlib.suppress(OSError):
        while True:
            os.open(os.devnull, os.O_RDONLY)


def report_error(world, call, again):
    before = time.monotonic()
    try:
        call()
    except (ss.Error, MemoryError) as error:
        found = {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - before}
        if isinstance(error, ss.PeerLostError):
            found |= {"ranks": error.ranks, "hosts": error.hosts}
            same = pickle.loads(pickle.dumps(error))
            assert (same.ranks, same.hosts) == (error.ranks, error.hosts)
        try:
            again()
        except ss.Error as next_error:
            found["next"] = str(next_error)
        report(rank=world.rank, **found)


def run_out(of, verb):
    world = start()
    array = np.ones(15_000_000)
    mapped = verb == "allreduce of shared arrays"
    if mapped:  # which the others have, and rank 1 maps during the call
        array = world.zeros(array.size) if world.rank != 1 else array
    world.allreduce(np.ones(10))
    world.barrier()
    if world.rank == 1:
        {"memory": lack_memory, "descriptors": lack_descriptors}[of]()
    calls = {
        "allreduce": lambda: world.allreduce(array),
        "allreduce of shared arrays": lambda: world.allreduce(array),
        "bcast": lambda: world.bcast(array, root=0),
        "split": lambda: world.split(0),
        "group": lambda: world.group(range(world.size)),
    }
    report_error(world, calls[verb], world.barrier)
    if "TEST_RANK" in os.environ:
        signal.pause()  # not its end is what the others learn of
    ss.finalize()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

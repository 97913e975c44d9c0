"""The program of mpi_faults.py: random operations with known results, until one rank ends."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import samestep as ss

sys.path.append(str(Path(__file__).parents[1]))
import faults

MORE = 60  # operations after a fault that may end no rank


def strike(fault, seed):
    if fault in faults.KINDS:
        faults.strike(fault, random.Random(seed), set())
        return
    if fault == "pause":  # as for a virtual machine that stands still
        wake = subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        wake.wait()
        return
    if fault in ("SIGKILL", "SIGSEGV"):
        os.kill(os.getpid(), signal.Signals[fault])
    if fault.startswith("os._exit"):
        os._exit(7 if "7" in fault else 0)
    if fault == "sys.exit(0)":
        sys.exit(0)
    raise KeyError("no such batch")


def operations(world):
    """Functions of a count that return whether the result was right."""
    rank, size = world.rank, world.size
    pair = world.split(rank % 2)

    def allreduce(n):
        return (world.allreduce(np.full(n, rank + 1.0)) == size * (size + 1) // 2).all()

    def bcast(n):
        return (world.bcast(np.full(n, float(rank)), root=n % size) == n % size).all()

    def allgather(n):
        return (world.allgather(np.full(n, float(rank))) == np.arange(size)[:, None]).all()

    def ring(n):
        received, to, source = np.empty(n), (rank + 1) % size, (rank - 1) % size
        work = world.irecv(received, source)
        world.send(np.full(n, float(rank)), to)
        work.wait()
        return (received == source).all()

    def in_pair(n):
        return (pair.allreduce(np.ones(n)) == pair.size).all()

    return [allreduce, bcast, allgather, ring, in_pair]


def run_until(seed, victim, at, catches, moment, fault, timeout):  # noqa: PLR0917
    """`fault` befalls `victim` before its operation number `at`, and it writes the time of that to the file `moment`.

    Each rank writes a line of what it found, the victim too if it can.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    world = ss.initialize("mpi", timeout=timeout)
    choices, acts, done, wrong = random.Random(seed), operations(world), 0, 0
    error = None
    try:
        while done < at + MORE:
            act = choices.choice(acts)
            n = choices.choice([1, 1000, 30_000, 300_000])
            if (world.rank, done) == (victim, at):
                with open(moment, "w") as file:
                    file.write(str(time.time()))
                strike(fault, seed)
            wrong += not act(n)
            done += 1
    except (ss.Error, MemoryError, OSError) as failed:
        error = failed
    line = {
        "rank": world.rank,
        "kind": type(error).__name__ if error else "",
        "at": time.time(),
        "done": done,
    }
    line |= {"wrong": int(wrong), "names": f"rank {victim}" in str(error)}
    os.write(1, ("<" + json.dumps(line) + ">\n").encode())
    if error and not catches:
        raise error


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

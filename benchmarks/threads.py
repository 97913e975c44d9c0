"""How many threads each rank of a host should have: every number beside the one that `samestep run` chooses.

    python benchmarks/threads.py -n 2            # two ranks; every number of threads up to the CPUs of this machine

Each rank multiplies matrices with NumPy and averages the result, as a training step does. The contenders take turns in
each round, and the time of the slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np
import samestep as ss
from samestep._util import cpus

SIZE, STEPS = 768, 12
ROUNDS = 5


def rank() -> None:
    """What each rank runs: the median time of a step, of the slowest rank."""
    backend = ss.initialize()
    rng = np.random.default_rng(backend.rank)
    x, w = (rng.standard_normal((SIZE, SIZE), "f4") for _ in range(2))
    times = []
    for _ in range(STEPS):
        backend.barrier()
        begin = time.perf_counter()
        gradient = x.T @ np.tanh(x @ w)
        backend.allreduce(gradient, "avg")
        times.append(time.perf_counter() - begin)
    slowest = backend.allreduce(np.array(times), "max")
    if backend.rank == 0:
        print(json.dumps(float(np.median(slowest))), flush=True)
    ss.finalize()


def step_s(n_ranks: int, threads: int | None) -> float:
    """Seconds of a step with so many threads; None = as the launcher chooses."""
    env = {name: value for name, value in os.environ.items() if name != cpus.THREADS}
    if threads is not None:
        env[cpus.THREADS] = str(threads)
    command = [sys.executable, "-m", "samestep", "run", "--raw", "-n", str(n_ranks), __file__, "--rank"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank:
        rank()
        return
    usable = cpus.usable_cpus()
    chosen = cpus.threads_of_ranks(flags.n, {}).get(cpus.THREADS, "the library's")
    contenders: list[int | None] = [None, *range(1, usable + 1)]
    times: dict[int | None, list[float]] = {threads: [] for threads in contenders}
    for _ in range(ROUNDS):
        for threads in contenders:
            times[threads].append(step_s(flags.n, threads))
    medians = {threads: statistics.median(found) for threads, found in times.items()}
    best = min(seconds for threads, seconds in medians.items() if threads is not None)
    print(f"{flags.n} ranks on {usable} CPUs, a step of two products of {SIZE} x {SIZE} float32")
    for threads, seconds in medians.items():
        name = f"{threads} threads" if threads is not None else f"samestep run ({chosen} threads)"
        print(f"{name:<32}{seconds * 1e3:8.2f} ms  {seconds / best:5.2f} of the best number set by hand")


if __name__ == "__main__":
    main()

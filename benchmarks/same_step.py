"""What a mean over shards costs beside a plain average: `samestep run -n 2 benchmarks/same_step.py`.

All compute the gradients of a two-layer network from the same micro-batches. The plain loop adds them up in place and
averages the sum; "shards" adds them to an `Accumulator`, "copy=False" likewise without copies. Rounds are taken in
turns. Of each the median time of the slowest rank, in milliseconds, and the least processor time of rank 0, which other
programs on the machine disturb less; and what it takes more than the plain loop.
"""

import sys
import time

import numpy as np
import samestep as ss

SHARDS = 8
BATCH = 512
WIDTHS = {1: 707, 10: 2236, 25: 3536}  # of both layers, by millions of parameters
ROUNDS = 16


def gradients(params, x):
    hidden = np.tanh(x @ params["w1"])
    error = (hidden @ params["w2"]) / np.float32(len(x))
    return {"w1": x.T @ ((error @ params["w2"].T) * (1 - hidden**2)), "w2": hidden.T @ error}


def plain(backend, params, parts):
    total = None
    for x in parts:
        grads = gradients(params, x)
        if total is None:
            total = grads
        else:
            for name, grad in grads.items():
                total[name] += grad
    return ss.allreduce_gradients(backend, total)


def by_shard(total, params, parts, copy):
    for index, x in zip(total.indices, parts, strict=True):
        grads = gradients(params, x)
        total.add(grads, shard=index, weight=len(x), copy=copy)
    return total.mean()


def main(backend, millions):
    width = WIDTHS[millions]
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal((width, width), "f4") / width for name in ("w1", "w2")}
    total = ss.Accumulator(backend, SHARDS)
    parts = [rng.standard_normal((BATCH // SHARDS, width), "f4") for _ in total.indices]
    steps = {
        "plain": lambda: plain(backend, params, parts),
        "shards": lambda: by_shard(total, params, parts, copy=True),
        "copy=False": lambda: by_shard(total, params, parts, copy=False),
    }
    times, busy = ({name: [] for name in steps} for _ in range(2))
    for turn in range(ROUNDS):
        for name, step in steps.items():
            backend.barrier()
            start, busy_before = time.perf_counter(), time.process_time()
            step()
            ended = time.process_time() - busy_before
            took = backend.allreduce(time.perf_counter() - start, "max")
            if turn > 0:  # the first finds out how large arrays are moved fastest
                busy[name].append(ended * 1e3)
                times[name].append(took * 1e3)
    if backend.rank == 0:
        print(f"{2 * width * width / 1e6:.1f} M parameters, {backend.size} ranks:")
        walls = {name: np.median(values) for name, values in times.items()}
        least = {name: min(values) for name, values in busy.items()}
        for name in steps:
            more = ", ".join(f"{of[name] / of['plain'] - 1:+.1%}" for of in (walls, least))
            print(f"  {name:10} {walls[name]:7.1f} ms, processor {least[name]:7.1f} ms; {more}", flush=True)


if __name__ == "__main__":
    with ss.initialize() as world:
        for size in map(int, sys.argv[1:] or ["1", "10", "25"]):
            main(world, size)

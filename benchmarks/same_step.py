"""What a mean over shards costs beside a plain average: `python benchmarks/same_step.py [--rounds 30] [1 10 25]`.

Starts itself on 2 and on 4 ranks, with 1, 10 and 25 million parameters, and prints one table. All contenders compute
the gradients of a two-layer network from the same micro-batches. The plain loop adds them up in place and averages the
sum; "copied" is the plain loop with a copy of the gradients of every other micro-batch, which the default of `add`
needs; "shards" adds them to an `Accumulator`, "copy=False" likewise without copies.

In each round every contender takes one step, in an order that rotates. A step takes as long as it takes the slowest
rank. What shards cost more is the median of the ratios to the plain step of the same round, which a change of the load
from round to round does not move; behind it the interval that has the median with 95 % certainty, whatever the
distribution. The same for the processor time of all ranks, which other programs disturb less.
"""

import argparse
import subprocess
import sys
import time

import numpy as np
import samestep as ss
from samestep._util import launchers

SHARDS = 8
BATCH = 512
WIDTHS = {1: 707, 10: 2236, 25: 3536}  # of both layers, by millions of parameters
SIZES = (2, 4)
CONTENDERS = ("copied", "shards", "copy=False")


def gradients(params, x):
    hidden = np.tanh(x @ params["w1"])
    error = (hidden @ params["w2"]) / np.float32(len(x))
    return {"w1": x.T @ ((error @ params["w2"].T) * (1 - hidden**2)), "w2": hidden.T @ error}


def replicated(backend, params, parts, kept=None):
    total = None
    for i, x in enumerate(parts):
        grads = gradients(params, x)
        if kept is not None and i % 2 == 0:
            for name, grad in grads.items():
                np.copyto(kept[name], grad)
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


def contenders(backend, millions):
    width = WIDTHS[millions]
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal((width, width), "f4") / width for name in ("w1", "w2")}
    total = ss.Accumulator(backend, SHARDS)
    kept = {name: np.zeros_like(value) for name, value in params.items()}
    parts = [rng.standard_normal((BATCH // SHARDS, width), "f4") for _ in total.indices]
    return {
        "plain": lambda: replicated(backend, params, parts),
        "copied": lambda: replicated(backend, params, parts, kept),
        "shards": lambda: by_shard(total, params, parts, copy=True),
        "copy=False": lambda: by_shard(total, params, parts, copy=False),
    }


def measured(backend, steps, n_rounds):
    """By contender, the milliseconds of each round: on the slowest rank, and of all processors."""
    names = list(steps)
    wall, busy = ({name: [] for name in names} for _ in range(2))
    for turn in range(n_rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            backend.barrier()
            start, busy_before = time.perf_counter(), time.process_time()
            steps[name]()
            seconds, worked = time.perf_counter() - start, time.process_time() - busy_before
            seconds, worked = backend.allreduce(seconds, "max"), backend.allreduce(worked)
            if turn > 0:  # the first finds out how large arrays are moved fastest
                wall[name].append(seconds * 1e3)
                busy[name].append(worked * 1e3)
    return wall, busy


def more(times, name):
    """By how much `name` exceeds the plain loop: the median over the rounds, and its interval."""
    ratios = np.sort(np.divide(times[name], times["plain"])) - 1
    n = len(ratios)
    low = max(
        0, int((n - 1.96 * n**0.5) / 2)
    )  # a binomial distribution: each ratio is below the median or above
    return f"{100 * np.median(ratios):+.1f} % ({100 * ratios[low]:+.1f} to {100 * ratios[n - 1 - low]:+.1f})"


def main(n_rounds, sizes):
    with ss.initialize() as backend:
        for millions in sizes:
            wall, busy = measured(backend, contenders(backend, millions), n_rounds)
            cells = [more(times, name) for times in (wall, busy) for name in CONTENDERS]
            row = [f"{millions} M", str(backend.size), f"{np.median(wall['plain']):.0f} ms", *cells]
            if backend.rank == 0:
                print("|", " | ".join(row), "|", flush=True)


def launch(words):
    heads = [f"`{name}`" if "=" in name else name for name in CONTENDERS]
    print(
        "| parameters | ranks | plain |", " | ".join([*heads, *(f"processor, {head}" for head in heads)]), "|"
    )
    print("|---" * (3 + 2 * len(heads)) + "|", flush=True)
    command = [sys.executable, "-m", "samestep", "run", "--raw"]
    codes = [
        subprocess.run([*command, "-n", str(n), __file__, *words], check=False).returncode for n in SIZES
    ]
    return max(codes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("millions", type=int, nargs="*", help="of parameters: 1, 10, 25 (all)")
    flags = parser.parse_args()
    if not set(flags.millions) <= set(WIDTHS):
        parser.error(f"millions: {flags.millions}, choose from {sorted(WIDTHS)}")
    if not launchers.launcher().name:
        raise SystemExit(launch(sys.argv[1:]))
    main(flags.rounds, flags.millions or sorted(WIDTHS))

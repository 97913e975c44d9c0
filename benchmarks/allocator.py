#!/usr/bin/env python3
"""Costs and gains of `initialize(shared_arrays=True)`. Ranks of one host:

$ samestep run -n 2 benchmarks/allocator.py

Times are medians; variants take turns within each round. An allreduce takes as long as it takes the slowest rank.
"""

from __future__ import annotations

import argparse
import contextvars
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import samestep as ss

KIB, MIB = 1 << 10, 1 << 20
ORDINARY = contextvars.copy_context()  # of before `initialize`: NumPy's own memory


def seconds(call: Callable[[], object], n_calls: int) -> float:
    """Seconds for one of `n_calls` calls."""
    start = time.perf_counter()
    for _ in range(n_calls):
        call()
    return (time.perf_counter() - start) / n_calls


def take_turns(
    backend: ss.Backend, variants: dict[str, Callable[[], object]], n_calls: int, n_rounds: int
) -> list[float]:
    """Median over the rounds of the slowest rank's time, in microseconds."""
    for call in variants.values():
        seconds(call, 3)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(n_rounds):
        for name, call in variants.items():
            backend.barrier()
            times[name].append(backend.allreduce(seconds(call, n_calls), "max"))
    return [1e6 * median(of_variant) for of_variant in times.values()]


def reductions(backend: ss.Backend, n_rounds: int) -> list[tuple[str, list[float]]]:
    """allreduce of arrays of NumPy and of `backend.empty`."""
    rows = []
    for nbytes in (64 * KIB, MIB, 16 * MIB):
        count = nbytes // 4
        ordinary = ORDINARY.run(np.zeros, count, "f4")
        arrays = [ordinary, np.zeros(count, "f4"), backend.zeros(count, "float32")]
        calls = {str(i): lambda x=x: backend.allreduce(x) for i, x in enumerate(arrays)}
        rows.append(
            (
                f"allreduce {nbytes // KIB} KiB",
                take_turns(backend, calls, max(4, 8 * MIB // nbytes), n_rounds),
            )
        )
    return rows


def allocations(backend: ss.Backend, n_rounds: int) -> list[tuple[str, list[float]]]:
    """Arrays made and dropped, those of an expression, and one that is read."""
    rows = []
    for nbytes in (64 * KIB, MIB, 16 * MIB, 64 * MIB):
        count = nbytes // 4
        x = ORDINARY.run(np.ones, count, "f4")
        y = np.ones(count, "f4")
        pairs = {
            "np.empty": (lambda count=count: np.empty(count, "f4"),) * 2,
            "np.zeros": (lambda count=count: np.zeros(count, "f4"),) * 2,
            "a * b + a": (lambda x=x: x * x + x, lambda y=y: y * y + y),
            "a.sum()": (x.sum, y.sum),
        }
        for what, (ordinary, shared) in pairs.items():
            calls = {"ordinary": lambda call=ordinary: ORDINARY.run(call), "hook": lambda call=shared: call()}
            times = take_turns(backend, calls, max(4, min(2000, 16 * MIB // nbytes)), n_rounds)
            rows.append((f"{what} {nbytes // KIB} KiB", times))
    return rows


def main() -> None:
    """Print the tables on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    n_rounds = parser.parse_args().rounds
    with ss.initialize(shared_arrays=True) as backend:
        tables = [
            ("us | ordinary | shared_arrays | backend.empty", reductions(backend, n_rounds)),
            ("us | ordinary | shared_arrays", allocations(backend, n_rounds)),
        ]
        if backend.rank == 0:
            for head, rows in tables:
                print(f"\n| {head} |\n|---{'|--:' * head.count('|')}|")
                for what, times in rows:
                    print(f"| {what} | {' | '.join(f'{t:.2f}' for t in times)} |")


if __name__ == "__main__":
    main()

"""What programs for GPUs do on the host beside NCCL: small gathers, gathers of objects, and many groups, beside gloo.

    samestep run -n 4 benchmarks/torch_host_group.py
    samestep run -n 4 benchmarks/torch_host_group.py --groups 60

Rounds alternate between the backends in the same processes. A figure of a call is its mean time in the best round, on
the slowest rank, as in `torch_calls.py`; that of the groups is the best of the rounds, in each of which the ranks open
all groups, of two ranks each, and use them once.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

BACKENDS = ("samestep", "gloo")
CALLS = 20
"""In a round."""


def calls(group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    """One call of each kind."""
    n = dist.get_world_size()
    mine = torch.zeros(6, dtype=torch.int64)
    listed = [torch.zeros_like(mine) for _ in range(n)]
    flat = torch.zeros(6 * n, dtype=torch.int64)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name before torch 2.13
    objects = [None] * n
    request = {"step": 1, "tokens": [1, 2, 3], "finished": False}
    return {
        "all_gather, 48 bytes": lambda: dist.all_gather(listed, mine, group=group),
        f"{gather.__name__}, 48 bytes": lambda: gather(flat, mine, group=group),
        "all_gather_object": lambda: dist.all_gather_object(objects, request, group=group),
    }


def mean_time(call: Callable[[], object], n: int) -> float:
    """Seconds for each of `n` calls."""
    begin = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - begin) / n


def on_slowest(seconds: float) -> float:
    """The largest of all ranks."""
    return float(dist.group.WORLD._backend.allreduce(np.array([seconds]), "max")[0])


def time_calls(n_rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of a call, by what and by backend."""
    of = {backend: calls(dist.new_group(backend=backend)) for backend in BACKENDS}
    best: dict[str, dict[str, float]] = {}
    for what in of[BACKENDS[0]]:
        times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for _, backend in itertools.product(range(n_rounds), BACKENDS):
            mean_time(of[backend][what], 3)
            dist.barrier()
            times[backend].append(mean_time(of[backend][what], CALLS))
        best[what] = {backend: 1e6 * on_slowest(min(found)) for backend, found in times.items()}
    return best


def time_groups(n_groups: int, n_rounds: int) -> dict[str, float]:
    """Seconds to open so many groups and to use each once, by backend."""
    n, rank = dist.get_world_size(), dist.get_rank()
    pairs = list(itertools.islice(itertools.cycle(itertools.combinations(range(n), 2)), n_groups))
    times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for _, backend in itertools.product(range(n_rounds), BACKENDS):
        dist.barrier()
        begin = time.perf_counter()
        groups = [dist.new_group(list(pair), backend=backend) for pair in pairs]
        for pair, group in zip(pairs, groups, strict=True):
            if rank in pair:
                dist.all_reduce(torch.ones(1), group=group)
        times[backend].append(on_slowest(time.perf_counter() - begin))
        for pair, group in zip(pairs, groups, strict=True):
            if rank in pair:
                dist.destroy_process_group(group)
        del groups, group  # gloo ends its threads here, and not in the round of the other backend
    return {backend: min(found) for backend, found in times.items()}


def main() -> None:
    """Prints one table in Markdown, from rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--groups", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("samestep")
    rows = {f"{what}, us": row for what, row in time_calls(arguments.rounds).items()}
    if arguments.groups:
        rows[f"{arguments.groups} groups of two ranks, s"] = time_groups(arguments.groups, 3)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, torch {torch.__version__}")
        print("| | samestep | gloo | times faster |\n|---|--:|--:|--:|")
        for what, row in rows.items():
            ours, theirs = (row[backend] for backend in BACKENDS)
            print(f"| {what} | {ours:.3g} | {theirs:.3g} | {theirs / ours:.1f} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What one call of torch.distributed costs over the backend "samestep", beside gloo, and how much of it is torch's own.

    samestep run -n 2 benchmarks/torch_calls.py
    samestep run -n 1 benchmarks/torch_calls.py

Short rounds alternate between the contenders in the same processes; a figure is the mean time of a call in the best
round, on the slowest rank: what the calls cost where nobody else uses the processors. "floor" is a process group in
Python whose `allreduce` does nothing and returns one finished Work: what torch's `all_reduce` costs before any backend.
"numpy" is `Backend.allreduce` of the same number of bytes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import samestep as ss
import torch
import torch.distributed as dist

SIZES = {8: 100, 4 << 10: 100, 1 << 20: 10}
"""Calls in a round, by bytes."""
CONTENDERS = ("samestep", "samestep async", "gloo", "gloo async", "floor", "floor async", "numpy")


class _Finished(dist.Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class Floor(dist.ProcessGroup):
    """A process group that does nothing."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._finished = _Finished()

    def getBackendName(self) -> str:
        return "floor"

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> dist.Work:
        return self._finished


def contenders(backend: ss.Backend, nbytes: int) -> dict[str, Callable[[], object]]:
    """One call of each, on memory of its own."""
    gloo = dist.new_group(backend="gloo")
    floor = Floor()
    dist.distributed_c10d._world.pg_map[floor] = ("floor", None)
    dist.distributed_c10d._world.pg_names[floor] = "floor"
    dist.distributed_c10d._world.pg_group_ranks[floor] = {dist.get_rank(): 0}
    tensors = [torch.zeros(nbytes // 4) for _ in CONTENDERS]
    array = np.zeros(nbytes // 4, np.float32)

    def blocking(group: dist.ProcessGroup | None, x: torch.Tensor) -> Callable[[], object]:
        return lambda: dist.all_reduce(x, group=group)

    def pending(group: dist.ProcessGroup | None, x: torch.Tensor) -> Callable[[], object]:
        return lambda: dist.all_reduce(x, group=group, async_op=True).wait()

    groups = {"samestep": None, "gloo": gloo, "floor": floor}
    calls: dict[str, Callable[[], object]] = {}
    for name, x in zip(CONTENDERS, tensors, strict=True):
        group, _, kind = name.partition(" ")
        if group in groups:
            calls[name] = (pending if kind else blocking)(groups[group], x)
    calls["numpy"] = lambda: backend.allreduce(array)
    return calls


def mean_time(call: Callable[[], object], n: int) -> float:
    """Seconds for each of `n` calls."""
    begin = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - begin) / n


def measure(nbytes: int, n_rounds: int) -> dict[str, float]:
    """Microseconds of a call, by contender: of the best round, on the slowest rank."""
    backend = dist.group.WORLD._backend
    calls = contenders(backend, nbytes)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(n_rounds):
        for name, call in calls.items():
            mean_time(call, 3)
            dist.barrier()
            times[name].append(1e6 * mean_time(call, SIZES[nbytes]))
    best = np.array([min(times[name]) for name in calls])
    return dict(zip(calls, backend.allreduce(best, "max").tolist(), strict=True))


def main() -> None:
    """Prints one table in Markdown, from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("samestep")
    rows = {nbytes: measure(nbytes, arguments.rounds) for nbytes in SIZES}
    if dist.get_rank() == 0:
        print(
            f"microseconds of all_reduce, {dist.get_world_size()} ranks, torch {torch.__version__}",
            flush=True,
        )
        print("| bytes | " + " | ".join(CONTENDERS) + " |\n|--:" + "|--:" * len(CONTENDERS) + "|")
        for nbytes, row in rows.items():
            print(
                f"| {nbytes:,} | " + " | ".join(f"{row[name]:.2f}" for name in CONTENDERS) + " |", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

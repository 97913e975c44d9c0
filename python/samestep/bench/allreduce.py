"""What each rank of `samestep bench` does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from samestep.backend import Backend
from samestep.world import finalize, initialize

_SIZES = ((8, "8 B"), (1 << 10, "1 KiB"), (1 << 16, "64 KiB"), (1 << 20, "1 MiB"), (1 << 24, "16 MiB"))
_BURST = 0.02  # seconds of calls in a row
_ROUNDS = 7

Call = Callable[[np.ndarray], object]


def main() -> int:
    """Measures on all ranks; rank 0 prints. Returns the exit code."""
    backend = initialize()
    for line in rows(backend):
        if backend.rank == 0:
            print(line, flush=True)
    finalize()
    return 0


def rows(backend: Backend) -> Iterator[str]:
    """The lines of the table, as they are measured. Collective."""
    calls = _calls(backend)
    first, *others = calls
    yield (
        f"allreduce of float32, in place, {backend.size} rank(s), engine {backend.engine}: "
        f"us per call, median of {_ROUNDS} runs, slowest rank"
    )
    ratios = "".join(f"  {first}/{other}" for other in others)
    yield f"{'size':>8}" + "".join(f"{name:>12}" for name in calls) + ratios
    for nbytes, size in _SIZES:
        times = measure(backend, calls, np.zeros(nbytes // 4, np.float32))
        ratios = "".join(
            f"{times[first] / times[other]:>{len(first) + len(other) + 3}.2f}" for other in others
        )
        yield f"{size:>8}" + "".join(f"{seconds * 1e6:>12.2f}" for seconds in times.values()) + ratios


def measure(backend: Backend, calls: dict[str, Call], x: np.ndarray) -> dict[str, float]:
    """Seconds of one call for each of `calls`, which take turns. Collective.

    Args:
      backend: the group.
      calls: by name, what reduces an array in place over the same ranks.
      x: the array, zeros.
    """

    def burst(call: Call, count: int) -> float:
        backend.barrier()
        start = time.perf_counter()
        for _ in range(count):
            call(x)
        return float(backend.allreduce((time.perf_counter() - start) / count, "max"))

    slowest = max(min(burst(call, 3) for _ in range(3)) for call in calls.values())
    count = max(3, int(_BURST / slowest))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            times[name].append(burst(call, count))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _calls(backend: Backend) -> dict[str, Call]:
    calls: dict[str, Call] = {"samestep": backend.allreduce}
    if backend.engine == "mpi":
        from mpi4py import MPI

        calls["mpi4py"] = partial(MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE)
    return calls

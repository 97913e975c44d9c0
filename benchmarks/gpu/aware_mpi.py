"""SAMESTEP_GPU_AWARE_MPI as 0 and as 1, alternately in one run: device arrays through the host, and given to MPI.

With 1 all messages of the host go through MPI, too.

mpirun -n 2 python benchmarks/gpu/aware_mpi.py

One rank of each two sends to the other and back; all take part in the collectives. Medians over ranks' slowest, in us.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import device_kinds
import numpy as np
import samestep as ss
from samestep import _settings
from samestep._util import launchers

SIZES = (64 << 10, 1 << 20, 16 << 20)  # bytes; the collectives give MPI nothing of 16 KiB and less
ROUNDS, TURNS = 3, 15


def operations(arrays: Any, backend: Any, nbytes: int) -> dict[str, Callable[[], Any]]:
    count = nbytes // 4
    x, y = (arrays.of(np.ones(count, "float32")) for _ in range(2))
    wide = arrays.of(np.ones((backend.size, count), "float32"))
    other = backend.rank ^ 1

    def ping_pong() -> None:
        if other >= backend.size:
            return
        if backend.rank < other:
            backend.send(x, other)
            backend.recv(y, other)
        else:
            backend.recv(y, other)
            backend.send(x, other)

    return {
        "ping-pong": ping_pong,
        "bcast": lambda: backend.bcast(x, root=0),
        "allgather": lambda: backend.allgather(x, out=wide),
        "alltoall": lambda: backend.alltoall(wide),
    }


def times(arrays: Any, aware: str) -> dict[tuple[str, int], list[float]]:
    os.environ[_settings.GPU_AWARE_MPI] = aware
    found: dict[tuple[str, int], list[float]] = {}
    with ss.initialize("mpi", timeout=60.0) as backend:
        for nbytes in SIZES:
            for name, operation in operations(arrays, backend, nbytes).items():
                spent = []
                for _ in range(TURNS):
                    arrays.synchronize()
                    backend.barrier()
                    begin = time.perf_counter()
                    operation()
                    arrays.synchronize()
                    spent.append(backend.allreduce(1e6 * (time.perf_counter() - begin), "max"))
                found[name, nbytes] = spent[3:]  # the first connect and pin
    return found


def main() -> int:
    arrays = device_kinds.choose()
    kept: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(ROUNDS):
        for aware in ("0", "1"):
            for (name, nbytes), spent in times(arrays, aware).items():
                kept.setdefault((name, nbytes, aware), []).extend(spent)
    rank = launchers.launcher().rank
    if rank == 0:
        print("| operation | bytes | through the host | given to MPI | ratio |\n|---|---|---|---|---|")
    for name, nbytes, aware in kept:
        if aware == "0" and rank == 0:
            host, direct = (statistics.median(kept[name, nbytes, a]) for a in ("0", "1"))
            print(f"| {name} | {nbytes} | {host:.0f} | {direct:.0f} | {direct / host:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

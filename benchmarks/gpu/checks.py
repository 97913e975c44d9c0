"""What one rank checks and times on its device, for kit.sh: `checks.py BACKEND RANK SIZE PLACE`.

Device arrays are torch's where torch sees a device, else those of the stand-ins.
"""

import json
import os
import sys
import time

import numpy as np
import samestep as ss

DTYPES = ["float32", "float64", "float16", "int32", "int64", "uint8"]
SIZES = [4, 4 << 10, 1 << 20, 16 << 20]  # bytes


class Torch:
    """Device arrays by torch."""

    def __init__(self):
        import torch

        self.torch = torch

    def of(self, values):
        return self.torch.from_numpy(np.array(values)).cuda(non_blocking=True)

    def get(self, array):
        return array.cpu().numpy()

    def synchronize(self):
        self.torch.cuda.synchronize()


class Fakes:
    """Device arrays by the stand-ins."""

    def __init__(self):
        import fake_arrays

        self.fakes = fake_arrays
        self.stream = fake_arrays.Stream()

    def of(self, values):
        return self.fakes.array_of(np.array(values), self.stream)

    def get(self, array):
        return array.get() if isinstance(array, self.fakes.Array) else array.numpy()

    def synchronize(self):
        self.stream.synchronize()


def library():
    if "libfake_" in os.environ.get("SAMESTEP_CUDART_LIBRARY", ""):
        return Fakes()
    return Torch()


def tell(**what):
    print("RESULT " + json.dumps(what), flush=True)


def check_verbs(backend, arrays):
    """Every verb on every dtype, with numbers whose sums are exact."""
    n, rank, wrong = backend.size, backend.rank, []
    for dtype in DTYPES:
        for count in (0, 1, 5, 1003):
            inputs = [(np.arange(n * count).reshape(n, count) % 7 + r).astype(dtype) for r in range(n)]
            mine = inputs[rank]
            expected = {
                "allreduce": sum(inputs).astype(dtype),
                "bcast": inputs[n - 1],
                "allgather": np.stack(inputs),
                "alltoall": np.stack([x[rank] for x in inputs]),
                "reduce_scatter": sum(inputs).astype(dtype)[rank],
                "scatter": inputs[0][rank],
            }
            results = {
                "allreduce": backend.allreduce(arrays.of(mine)),
                "bcast": backend.bcast(arrays.of(mine), root=n - 1),
                "allgather": backend.allgather(arrays.of(mine)),
                "alltoall": backend.alltoall(arrays.of(mine)),
                "reduce_scatter": backend.reduce_scatter(arrays.of(mine)),
                "scatter": backend.scatter(arrays.of(mine) if rank == 0 else None, out=arrays.of(mine[0])),
            }
            wrong += [
                f"{verb} of {count} {dtype}"
                for verb, result in results.items()
                if not np.array_equal(arrays.get(result), expected[verb])
            ]
    return wrong


def check_streams(backend, arrays, turns=200):
    """New numbers in the same memory each turn, with nothing but the streams to keep the order."""
    x = arrays.of(np.zeros(1 << 16, "float32"))
    sums = []
    for turn in range(turns):
        fresh = arrays.of(np.full(1 << 16, turn % 13, "float32"))
        sums.append((turn % 13 * backend.size, backend.allreduce(fresh, out=x) and arrays.get(x)))
    return sum(bool((got != expected).any()) for expected, got in sums)


def check_leaks(make, turns):
    """Seconds of one initialize and close; memory that stays, in bytes, between the second and the last turn."""
    import resource

    begin, before = time.perf_counter(), 0
    for turn in range(turns):
        make(turn).close()
        if turn == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {"turns": turns, "seconds_each": (time.perf_counter() - begin) / turns, "grown_bytes": grown}


def times(backend, arrays):
    rows = []
    for nbytes in SIZES:
        x = arrays.of(np.ones(nbytes // 4, "float32"))
        host = np.ones(nbytes // 4, "float32")
        for _ in range(3):
            backend.allreduce(x)
            backend.allreduce(host)
        turns = 100 if nbytes < 1 << 20 else 20
        arrays.synchronize()
        begin = time.perf_counter()
        for _ in range(turns):
            backend.allreduce(x, "max")
        called = time.perf_counter()
        arrays.synchronize()
        ended = time.perf_counter()
        for _ in range(turns):
            backend.allreduce(host, "max")
        rows.append(
            {
                "bytes": nbytes,
                "device_call_us": 1e6 * (called - begin) / turns,
                "device_us": 1e6 * (ended - begin) / turns,
                "host_us": 1e6 * (time.perf_counter() - ended) / turns,
            }
        )
    return rows


def main(kind, rank, size, place):
    os.makedirs(place, exist_ok=True)

    def make(turn):
        method = f"file://{place}/meeting-{turn}"
        return ss.initialize(kind, init_method=method, rank=rank, world_size=size, timeout=60)

    with make("checks") as backend:
        arrays = library()
        wrong = check_verbs(backend, arrays)
        tell(rank=rank, check="verbs", wrong=wrong)
        unordered = check_streams(backend, arrays)
        tell(rank=rank, check="streams", wrong=unordered)
        tell(rank=rank, check="times", rows=times(backend, arrays))
        del arrays
    tell(rank=rank, check="leaks", **check_leaks(make, 30 if size == 1 else 5))
    return bool(wrong or unordered)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))

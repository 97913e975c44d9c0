"""Parts of the kit that compare numbers: `kit_checks.py verbs|streams KIND`."""

from __future__ import annotations

import sys
from typing import Any

import device_kinds
import numpy as np
import samestep as ss
from kit_rank import SHORT, SIZE, tell, turns
from kit_rank import start as start_ranks

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64", "uint32", "uint64")
DTYPES = (*FLOATS, *INTEGERS, "bool", "complex64", "complex128")
FEW = ("float32", "float16", "bfloat16", "int64", "bool", "complex64")
EVEN_FROM = {
    "float16": 2048,
    "bfloat16": 256,
}  # from here on the next number is 2 away: a sum with 1 stays as it is
COUNTS = (0, 1, 2, 5, 1003, 70_001)  # empty, fewer than ranks, uneven, more than a block of threads


def mine(rank: int, count: int, dtype: str) -> np.ndarray[Any, Any]:
    """Small integers, whose sums and products over 4 ranks are exact in every dtype."""
    values = (np.arange(count) + rank) % 3 + (rank % 2)
    kind = "float32" if dtype == "bfloat16" else dtype
    return (values % 2 if dtype == "bool" else values).astype(kind)


def reduced(inputs: list[Any], op: str) -> Any:
    stacked = np.stack(inputs)
    if stacked.dtype == bool:
        return stacked.any(0) if op in ("sum", "max") else stacked.all(0)
    whole = {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max}[op](stacked, axis=0)
    return whole.astype(stacked.dtype)


def ops_of(dtype: str) -> tuple[str, ...]:
    return ("sum", "prod") if dtype.startswith("complex") else ("sum", "prod", "min", "max")


class Checker:
    """Compares, and keeps what differs."""

    def __init__(self, backend: Any, arrays: Any) -> None:
        self.backend, self.arrays = backend, arrays
        self.n_checked, self.wrong = 0, []  # type: int, list[str]

    def compare(self, what: str, got: Any, expected: Any) -> None:
        self.n_checked += 1
        if not np.array_equal(self.arrays.get(got).reshape(-1), np.asarray(expected).reshape(-1)):
            self.wrong.append(what)

    def reductions(self, dtype: str, count: int) -> None:
        backend, of, n = self.backend, self.arrays.of, self.backend.size
        inputs = [mine(r, count, dtype) for r in range(n)]
        for op in ops_of(dtype):
            what, expected = f"of {count} {dtype}, {op}", reduced(inputs, op)
            self.compare(
                "allreduce " + what, backend.allreduce(of(inputs[backend.rank], dtype), op), expected
            )
            result = backend.reduce(of(inputs[backend.rank], dtype), op, root=n - 1)
            if backend.rank == n - 1:
                self.compare("reduce " + what, result, expected)
            rows = [np.stack([mine(r + k, count, dtype) for k in range(n)]) for r in range(n)]
            got = backend.reduce_scatter(of(rows[backend.rank], dtype), op)
            self.compare("reduce_scatter " + what, got, reduced(rows, op)[backend.rank])
        if dtype in FLOATS:
            x = of(inputs[backend.rank] * 4, dtype)
            self.compare(f"premul of {count} {dtype}", backend.allreduce(x, ss.premul(0.25)), sum(inputs))
            whole = [values * n for values in inputs]
            x = of(whole[backend.rank], dtype)
            out = of(np.full_like(whole[0], 77), dtype)
            elsewhere = backend.allreduce(x, "avg", out=out)  # n is a power of two
            self.compare(f"avg of {count} {dtype}, elsewhere", elsewhere, sum(inputs))
            self.compare(f"avg of {count} {dtype}", backend.allreduce(x, "avg"), sum(inputs))
        if dtype in EVEN_FROM and n == 4:  # the average of two needs no more bits than they have
            shares = [EVEN_FROM[dtype], 1, 1, 4]
            turned = [np.resize(np.roll(shares, r), count).astype("float32") for r in range(n)]
            x = of(turned[backend.rank].astype(inputs[0].dtype), dtype)
            self.compare(
                f"avg of {count} {dtype}, rounded once", backend.allreduce(x, "avg"), sum(turned) / 4
            )

    def movement(self, dtype: str, count: int) -> None:
        backend, of = self.backend, self.arrays.of
        n, rank = backend.size, backend.rank
        inputs = [mine(r, count, dtype) for r in range(n)]
        rows = [np.stack([mine(r + 2 * k, count, dtype) for k in range(n)]) for r in range(n)]
        here, what = of(inputs[rank], dtype), f"of {count} {dtype}"
        self.compare("allgather " + what, backend.allgather(here), np.stack(inputs))
        gathered = backend.gather(here, root=0)
        if rank == 0:
            self.compare("gather " + what, gathered, np.stack(inputs))
        self.compare(
            "alltoall " + what, backend.alltoall(of(rows[rank], dtype)), np.stack([x[rank] for x in rows])
        )
        out = of(np.zeros_like(inputs[0]), dtype)
        scattered = backend.scatter(of(rows[0], dtype) if rank == 0 else None, root=0, out=out)
        self.compare("scatter " + what, scattered, rows[0][rank])
        self.compare("bcast " + what, backend.bcast(of(inputs[rank], dtype), root=n - 1), inputs[n - 1])

    def trees(self, dtype: str) -> None:
        """Many small leaves, of uneven sizes, with a large one among them."""
        backend, of, n = self.backend, self.arrays.of, self.backend.size
        sizes = [*range(1, 60), 1003, 4096, 4097, 300_001]

        def leaf(rank: int, k: int) -> Any:
            return mine(rank + k, sizes[k], dtype)

        tree = {str(k): of(leaf(backend.rank, k), dtype) for k in range(len(sizes))}
        got = backend.allreduce_tree(tree, "sum")
        for k, size in enumerate(sizes):
            expected = reduced([leaf(r, k) for r in range(n)], "sum")
            self.compare(f"leaf of {size} {dtype} in a tree", got[str(k)], expected)
        tree = {str(k): of(leaf(backend.rank, k), dtype) for k in range(len(sizes))}
        got = ss.synchronize(backend, tree, root=n - 1)
        for k, size in enumerate(sizes):
            self.compare(f"leaf of {size} {dtype} synchronized", got[str(k)], leaf(n - 1, k))


def extent() -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Dtypes and counts. Ranks that share a device take turns on it: an operation then takes some 10 ms for each."""
    if SHORT:
        return ("float32", "float16", "bfloat16", "int64"), (1003,)
    if SIZE == 1:
        return DTYPES, COUNTS
    return (DTYPES if SIZE == 2 else FEW), (0, 1, 1003)


def verbs(kind: str) -> int:
    """Every verb on every dtype and awkward sizes."""
    arrays = device_kinds.choose()
    with start_ranks(kind) as backend:
        checker, skipped = Checker(backend, arrays), []
        dtypes, counts = extent()
        for dtype in dtypes:
            try:
                checker.arrays.of(mine(0, 1, dtype), dtype)
            except TypeError as error:  # the array library lacks it
                skipped.append(f"{dtype}: {error}")
                continue
            for count in counts:
                checker.reductions(dtype, count)
                checker.movement(dtype, count)
            checker.trees(dtype)
        tell(
            what="verbs",
            kind=kind,
            arrays=checker.arrays.name,
            checked=checker.n_checked,
            wrong=checker.wrong,
            dtypes_skipped=skipped,
        )
        return bool(checker.wrong)


def streams(kind: str) -> int:
    """Arrays made late in their stream, used at once, and made anew right after: a missing order is a wrong number."""
    count, wrong, n_turns = 1 << 16, 0, turns(300 if SIZE == 1 else 80, 12)
    arrays = device_kinds.choose()  # first, as users import their library before they start
    with start_ranks(kind) as backend:
        n = backend.size
        x, y = (arrays.of(np.zeros(count, "float32")) for _ in range(2))
        kept = [arrays.of(np.zeros(count, "float32")) for _ in range(8)]
        for turn in range(n_turns):
            arrays.busy(0.001)
            arrays.fill(x, turn % 13 + backend.rank)
            work = backend.iallreduce(x, out=y)
            work.wait()
            arrays.copy(kept[turn % 8], y)  # in the stream, after the operation
            arrays.fill(y, -1.0)  # and this after the copy
            arrays.fill(x, -1.0)
            if turn % 8 == 7:
                for k, array in enumerate(kept):
                    expected = n * ((turn - 7 + k) % 13) + n * (n - 1) // 2
                    wrong += bool((arrays.get(array) != expected).any())
        tell(what="streams", kind=kind, turns=n_turns // 8 * 8, wrong=wrong)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit({"verbs": verbs, "streams": streams}[sys.argv[1]](sys.argv[2]))

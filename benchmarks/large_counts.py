"""Counts beyond 2^31: every rank moves 2 GiB and five bytes, and looks at elements on both sides of the limit.

    samestep run -n 2 benchmarks/large_counts.py                                        # shared memory
    SAMESTEP_MPI_TRANSPORT=mpi samestep run -n 2 --mpi benchmarks/large_counts.py       # all through MPI

Takes 2.2 GB for each rank and is no test for that reason.
"""

import time

import numpy as np
import samestep as ss

COUNT = 2**31 + 5
MARKS = (0, 2**31 - 1, 2**31, COUNT - 1)


def marked(rank: int, x: np.ndarray) -> None:
    x[...] = 1 + rank
    for place, mark in enumerate(MARKS):
        x[mark] = 10 * (place + 1) + rank


def main() -> None:
    backend = ss.initialize()
    x = np.empty(COUNT, np.uint8)
    others = range(backend.size)

    def check(verb: str, started: float, expected: list[int], remaining: int) -> None:
        assert [int(x[mark]) for mark in MARKS] == expected, (verb, x[list(MARKS)])
        assert int(x[1]) == int(x[-2]) == remaining, verb
        if backend.rank == 0:
            print(
                f"{verb} of {COUNT} elements over {backend.transport}: right, {time.time() - started:.1f} s",
                flush=True,
            )

    marked(backend.rank, x)
    started = time.time()
    backend.allreduce(x, "sum")
    check(
        "allreduce",
        started,
        [sum(10 * (i + 1) + r for r in others) for i in range(4)],
        sum(1 + r for r in others),
    )

    marked(backend.rank, x)
    started, root = time.time(), backend.size - 1
    backend.bcast(x, root=root)
    check("bcast", started, [10 * (i + 1) + root for i in range(4)], 1 + root)

    marked(backend.rank, x)
    started = time.time()
    if backend.rank == 0:
        backend.send(x, root)
    elif backend.rank == root:
        assert backend.recv(x, 0).count == COUNT
    if backend.rank in (0, root):
        check("send and recv", started, [10 * (i + 1) for i in range(4)], 1)
    backend.barrier()


if __name__ == "__main__":
    main()

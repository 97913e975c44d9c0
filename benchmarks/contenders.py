"""Who is measured: each contender says, as text, what a user of it would write.

A new contender is a function that returns a `Contender`, and a line in `CONTENDERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from os import sched_yield
from time import perf_counter_ns
from typing import Any

import numpy as np
from problems import DTYPE, Allocate, Array, Buffers


def ordinary(shape: tuple[int, ...]) -> Array:
    """An ordinary NumPy array."""
    return np.empty(shape, DTYPE)


@dataclass(frozen=True)
class Contender:
    """A way to do the verbs.

    Attributes:
      name: as in `--contenders`.
      statements: by verb, the line that is timed; verbs it lacks are not measured. Names it may use: those
        of `names`, and of the arrays `x`, `out`, `leaves` and `tree` (the leaves as a dict), and `left` and
        `right`, the neighbours in a ring.
      names: what the statements refer to.
      allocate: makes the arrays of the shape given, elements of `DTYPE`.
      close: called at the end, on every rank.
    """

    name: str
    statements: Mapping[str, str]
    names: Mapping[str, Any]
    allocate: Allocate = ordinary
    close: Callable[[], None] = lambda: None

    def timed(self, verb: str, buffers: Buffers, rank: int, size: int) -> Callable[[int], int]:
        """A function that runs the verb's statement `count` times in a row and returns the nanoseconds.

        The statement is compiled into the loop, as `timeit` does: a function of our own around the call
        would cost every contender the same and so hide part of what lies between them.
        """
        source = (
            "def timed(count):\n"
            "    start = clock()\n"
            "    for _ in repeat(None, count):\n"
            f"        {self.statements[verb]}\n"
            "    end = clock()\n"
            "    give_way()\n"  # a peer on the same core should not pay for what this rank does next
            "    return end - start\n"
        )
        scope = {
            **self.names,
            "x": buffers.x,
            "out": buffers.out,
            "leaves": buffers.sent,
            "tree": {f"leaf_{i:03}": leaf for i, leaf in enumerate(buffers.sent)},
            "left": (rank - 1) % size,
            "right": (rank + 1) % size,
            "clock": perf_counter_ns,
            "repeat": repeat,
            "give_way": sched_yield,
        }
        exec(compile(source, f"<{self.name} {verb}>", "exec"), scope)
        timed: Callable[[int], int] = scope["timed"]
        return timed


def _mpi4py() -> Contender:
    from mpi4py import MPI

    return Contender(
        "mpi4py",
        {
            "allreduce": "comm.Allreduce(MPI.IN_PLACE, x)",
            "bcast": "comm.Bcast(x, root=0)",
            "allgather": "comm.Allgather(x, out)",
            "reduce_scatter": "comm.Reduce_scatter_block(x, out)",
            "alltoall": "comm.Alltoall(x, out)",
            "sendrecv": "comm.Sendrecv(x, right, 0, out, left, 0)",
            "barrier": "comm.Barrier()",
            "synchronize": "for leaf in leaves: comm.Bcast(leaf, root=0)",
        },
        {"MPI": MPI, "comm": MPI.COMM_WORLD},
    )


def _samestep() -> Contender:
    import samestep

    return Contender(
        "samestep",
        {
            "allreduce": "backend.allreduce(x)",
            "bcast": "backend.bcast(x, root=0)",
            "allgather": "backend.allgather(x, out=out)",
            "reduce_scatter": "backend.reduce_scatter(x, out=out)",
            "alltoall": "backend.alltoall(x, out=out)",
            "sendrecv": "backend.sendrecv(x, right, out, left)",
            "barrier": "backend.barrier()",
            "synchronize": "samestep.synchronize(backend, tree)",
        },
        {"samestep": samestep, "backend": samestep.initialize()},
        close=samestep.finalize,
    )


def _shared() -> Contender:
    """The same calls on arrays in memory that the ranks share."""
    ordinary_arrays = _samestep()
    backend = ordinary_arrays.names["backend"]
    return replace(ordinary_arrays, name="shared", allocate=partial(backend.empty, dtype=DTYPE))


def _gloo() -> Contender:
    import tempfile

    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    place = comm.bcast(tempfile.mkdtemp(prefix="gloo-") if comm.rank == 0 else None)
    dist.init_process_group("gloo", f"file://{place}/store", rank=comm.rank, world_size=comm.size)
    return Contender(
        "gloo",
        {
            "allreduce": "dist.all_reduce(tensor(x))",
            "bcast": "dist.broadcast(tensor(x), 0)",
            "allgather": "dist.all_gather_into_tensor(tensor(out), tensor(x))",
            "barrier": "dist.barrier()",
        },
        {"dist": dist, "tensor": torch.from_numpy},
        close=dist.destroy_process_group,
    )


CONTENDERS: dict[str, Callable[[], Contender]] = {
    "mpi4py": _mpi4py,
    "samestep": _samestep,
    "shared": _shared,
    "gloo": _gloo,
}
"""By name. The first one asked for is what the others are compared with."""

"""Who is measured: each contender says, as text, what a user of it would write.

A new contender is a function that returns a `Contender`, and a line in `CONTENDERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from os import sched_yield
from time import perf_counter_ns
from typing import Any

import numpy as np
from problems import DTYPES, FLOAT32, Allocate, Array, Buffers
from results import KIB, LIMIT, Cell


@dataclass(frozen=True)
class Contender:
    """A way to do the verbs.

    Attributes:
      name: as in `--contenders`.
      statements: by verb, the line that is timed; verbs it lacks are not measured. Names it may use: those
        of `names`, and of the arrays `x`, `out`, `leaves` and `tree` (the leaves as a dict), and `left` and
        `right`, the adjacent ranks in a ring.
      names: what the statements refer to.
      allocate: makes an array of the shape and dtype given.
      wrap: what a user of the library would hold instead of such an array, over the same memory.
      dtypes: which of `problems.DTYPES` it has.
      instead: by verb, the problem it solves instead of the verb's own.
      spans: its time runs from the first rank's start to the last one's end, as its ranks do not wait.
      bursts: whether back-to-back calls are measured.
      least_nbytes: smaller arrays are not measured.
      may_fail: it may refuse a verb or a dtype; that is reported, and the run continues.
      close: called at the end, on every rank.
    """

    name: str
    statements: Mapping[str, str]
    names: Mapping[str, Any]
    allocate: Allocate = np.empty
    wrap: Callable[[Array], Any] = lambda array: array
    dtypes: Sequence[str] = DTYPES
    instead: Mapping[str, str] = field(default_factory=dict)
    spans: bool = False
    bursts: bool = True
    least_nbytes: int = 0
    may_fail: bool = True
    close: Callable[[], None] = lambda: None

    def has(self, cell: Cell) -> bool:
        """Whether it is measured in this cell."""
        return (
            cell.verb in self.statements
            and cell.dtype in self.dtypes
            and cell.nbytes >= self.least_nbytes
            and (self.bursts or cell.mode == "single")
        )

    def timed(self, verb: str, buffers: Buffers, rank: int, size: int) -> Callable[[int], tuple[int, int]]:
        """A function that runs the verb's statement `count` times in a row and returns (start, end) in ns.

        The statement is compiled into the loop, as `timeit` does: a function of our own around the call
        would cost every contender the same and so hide part of what lies between them.
        """
        source = (
            "def timed(count):\n"
            "    start = clock()\n"
            "    for _ in repeat(None, count):\n"
            f"        {self.statements[verb]}\n"
            "    end = clock()\n"
            "    yield_cpu()\n"  # a peer on the same core should not pay for what this rank does next
            "    return start, end\n"
        )
        held = buffers.map(self.wrap)
        scope = {
            **self.names,
            "x": held.x,
            "out": held.out,
            "leaves": held.sent,
            "tree": {f"leaf_{i:03}": leaf for i, leaf in enumerate(held.sent)},
            "left": (rank - 1) % size,
            "right": (rank + 1) % size,
            "clock": perf_counter_ns,
            "repeat": repeat,
            "yield_cpu": sched_yield,
        }
        exec(compile(source, f"<{self.name} {verb}>", "exec"), scope)
        timed: Callable[[int], tuple[int, int]] = scope["timed"]
        return timed


def _mpi4py() -> Contender:
    from mpi4py import MPI

    def with_type(array: Array) -> Any:
        if array.dtype.name != "bfloat16":
            return array
        kind = getattr(MPI, "BFLOAT16_T", MPI.DATATYPE_NULL)
        if kind == MPI.DATATYPE_NULL:
            raise TypeError("this MPI library has no bfloat16")
        return [array.view(np.uint16), kind]

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
        wrap=with_type,
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
        may_fail=False,
        close=samestep.finalize,
    )


def _shared() -> Contender:
    """The same calls on arrays in memory that the ranks share."""
    ordinary_arrays = _samestep()
    backend = ordinary_arrays.names["backend"]
    return replace(ordinary_arrays, name="shared", allocate=backend.empty)


def _gloo() -> Contender:
    import shutil
    import tempfile

    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    place = comm.bcast(tempfile.mkdtemp(prefix="gloo-") if comm.rank == 0 else None)
    dist.init_process_group("gloo", f"file://{place}/store", rank=comm.rank, world_size=comm.size)

    def tensor(array: Array) -> Any:
        flat = array.reshape(-1)  # the shape that all of its verbs agree on
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(flat)

    def close() -> None:
        dist.destroy_process_group()
        if comm.rank == 0:
            shutil.rmtree(place, ignore_errors=True)  # gloo removes its file, too

    statements = {
        "allreduce": "dist.all_reduce(x)",
        "bcast": "dist.broadcast(x, 0)",
        "allgather": "all_gather(out, x)",
        "reduce_scatter": "reduce_scatter(out, x)",
        "alltoall": "dist.all_to_all_single(out, x)",
        "sendrecv": "sent = dist.isend(x, right); dist.recv(out, left); sent.wait()",
        "barrier": "dist.barrier()",
        "synchronize": "for leaf in leaves: dist.broadcast(leaf, 0)",
    }
    if comm.size == 1:
        del statements["sendrecv"]  # it cannot send to itself
    names = {
        "dist": dist,
        # Newer torch warns at each call by the older name, which would cost gloo time.
        "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
        "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
    }
    return Contender("gloo", statements, names, wrap=tensor, close=close)


def _limit() -> Contender:
    """What all ranks must do at least, each for itself and at once.

    A sum in place reads and writes each array; from 16 MiB NumPy's loop is as fast as a vectorised one in C, at 1 MiB
    some 12 % slower (measured). What moves data copies once as many bytes as it receives; what receives the same, and
    may share the work, as many as that takes on average.
    """
    copy = "copyto(out, x)"
    return Contender(
        LIMIT,
        {"allreduce": "add(x, one, x)", "bcast": copy, "allgather": copy, "alltoall": copy, "sendrecv": copy},
        {"add": np.add, "one": np.float32(1), "copyto": np.copyto},
        dtypes=[FLOAT32],
        instead={
            "allreduce": "increment",
            "bcast": "copy_share",
            "allgather": "copy_all",
            "alltoall": "copy",
            "sendrecv": "copy",
        },
        spans=True,
        bursts=False,
        least_nbytes=64 * KIB,
    )


CONTENDERS: dict[str, Callable[[], Contender]] = {
    "mpi4py": _mpi4py,
    "samestep": _samestep,
    "shared": _shared,
    "gloo": _gloo,
    LIMIT: _limit,
}
"""By name. The first one asked for is what the others are compared with."""

NEEDS = {"gloo": "torch"}
"""What has to be installed for a contender that may be left out."""

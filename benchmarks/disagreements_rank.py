"""One rank of `disagreements.py`: python disagreements_rank.py SYSTEM CASE FOLDER."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

CULPRIT = 1
DEADLINE_S = 5.0  # for the case in which a rank stops, where the system has deadlines


class Samestep:
    """This package, without MPI."""

    def __init__(self) -> None:
        import samestep as ss

        self._group = ss.initialize(ss.NativeBackend, timeout=_deadline(600.0))
        self.rank = self._group.rank
        self.barrier, self.leave = self._group.barrier, ss.finalize

    def allreduce(self, x: Any, op: str = "sum") -> None:
        self._group.allreduce(x, op)

    def bcast(self, x: Any, root: int) -> None:
        self._group.bcast(x, root=root)


class Gloo:
    """torch.distributed over gloo."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=_deadline(1800.0)))
        self._torch, self._dist = torch, dist
        self.rank = dist.get_rank()
        self.barrier, self.leave = dist.barrier, dist.destroy_process_group

    def allreduce(self, x: Any, op: str = "sum") -> None:
        operator = {"sum": self._dist.ReduceOp.SUM, "max": self._dist.ReduceOp.MAX}[op]
        self._dist.all_reduce(self._torch.from_numpy(x), operator)

    def bcast(self, x: Any, root: int) -> None:
        self._dist.broadcast(self._torch.from_numpy(x), root)


class Mpi:
    """mpi4py over the MPI library that it loads, in which errors are exceptions and there are no deadlines."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank = self._comm.rank
        self.barrier, self.leave = self._comm.Barrier, MPI.Finalize

    def allreduce(self, x: Any, op: str = "sum") -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, x, {"sum": self._mpi.SUM, "max": self._mpi.MAX}[op])

    def bcast(self, x: Any, root: int) -> None:
        self._comm.Bcast(x, root)


class Mlx:
    """MLX over its ring backend, which has neither a broadcast nor deadlines: a broadcast is a sum with zeros."""

    def __init__(self) -> None:
        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        self._mx = mx
        self.rank = mx.distributed.init(strict=True, backend="ring").rank()

    def barrier(self) -> None:
        self.allreduce(np.zeros(1))

    def leave(self) -> None:
        """MLX has no call for it."""

    def allreduce(self, x: Any, op: str = "sum") -> None:
        mx = self._mx
        reduce = {"sum": mx.distributed.all_sum, "max": mx.distributed.all_max}[op]
        mx.eval(reduce(mx.array(x, dtype=getattr(mx, x.dtype.name))))

    def bcast(self, x: Any, root: int) -> None:
        self.allreduce(x if self.rank == root else np.zeros_like(x))


def _deadline(usual: float) -> float:
    return DEADLINE_S if sys.argv[2] == "stops" else usual


def shape(group: Any, culprit: bool) -> None:
    """One rank passes an array of another length."""
    group.allreduce(np.ones(5 if culprit else 4))


def dtype(group: Any, culprit: bool) -> None:
    """One rank passes float64 where the others pass float32."""
    group.allreduce(np.ones(4, np.float64 if culprit else np.float32))


def operator(group: Any, culprit: bool) -> None:
    """One rank asks for the maximum where the others ask for the sum."""
    group.allreduce(np.ones(4), "max" if culprit else "sum")


def verb(group: Any, culprit: bool) -> None:
    """One rank broadcasts where the others reduce."""
    if culprit:
        group.bcast(np.ones(4), 0)
    else:
        group.allreduce(np.ones(4))


def root(group: Any, culprit: bool) -> None:
    """One rank names another root of a broadcast."""
    group.bcast(np.ones(4), 2 if culprit else 0)


def skips(group: Any, culprit: bool) -> None:
    """One rank leaves out the first of two calls, of different shapes."""
    if not culprit:
        group.allreduce(np.ones(4))
    group.allreduce(np.ones(9))
    group.barrier()


def raises(group: Any, culprit: bool) -> None:
    """One rank ends with an exception instead of calling."""
    if culprit:
        raise ValueError("bad batch")
    group.allreduce(np.ones(4))


def returns(group: Any, culprit: bool) -> None:
    """One rank leaves the loop early and ends in order."""
    if culprit:
        group.leave()
        sys.exit(0)
    group.allreduce(np.ones(4))


def killed(group: Any, culprit: bool) -> None:
    """One rank is killed, as by the out-of-memory killer."""
    if culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    group.allreduce(np.ones(4))


def stops(group: Any, culprit: bool) -> None:
    """One rank stops and never comes back; a deadline of 5 s where the system has deadlines."""
    if culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.allreduce(np.ones(4))


SYSTEMS: dict[str, Callable[[], Any]] = {"samestep": Samestep, "gloo": Gloo, "mpi4py": Mpi, "mlx": Mlx}
CASES: dict[str, Callable[[Any, bool], None]] = {
    case.__name__: case
    for case in (shape, dtype, operator, verb, root, skips, raises, returns, killed, stops)
}


def main() -> None:
    """Runs the case; writes what this rank found, and when."""
    system, case, folder = sys.argv[1:]
    group = SYSTEMS[system]()
    group.allreduce(np.ones(4))
    group.barrier()
    report = _Report(Path(folder) / f"{group.rank}.json")
    Path(folder, f"{group.rank}.began").write_text(str(os.getpid()))
    try:
        CASES[case](group, group.rank == CULPRIT)
    except Exception as error:
        report.write(f"{type(error).__name__}: {error}")
        raise
    report.write("")


class _Report:
    """What this rank found, and after how long; whole or not at all, because the job may be killed at any time."""

    def __init__(self, path: Path) -> None:
        self._path, self._begin = path, time.monotonic()

    def write(self, text: str) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps({"seconds": time.monotonic() - self._begin, "text": text}))
        part.replace(self._path)


if __name__ == "__main__":
    main()

"""The functions of FluxMPI.jl under their names; each is one line over `samestep`.

    from samestep import fluxmpi as FluxMPI

    FluxMPI.Init()
    params = FluxMPI.synchronize(params, root_rank=0)
    opt = FluxMPI.DistributedOptimizer(opt)  # sums, so divide the loss by total_workers()
    FluxMPI.fluxmpi_println("ready")

Julia's `!` falls away. Arrays are written in place where they can be, and returned in any case.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from samestep import _core, _settings, data, optimizer
from samestep.backend import Backend
from samestep.errors import Error
from samestep.group import printing
from samestep.group.work import Work
from samestep.reduce_ops import Op, ReduceOp
from samestep.step import gradients
from samestep.trees import broadcast
from samestep.world import lifecycle

__all__ = [
    "DistributedDataContainer",
    "DistributedOptimizer",
    "Iallreduce",
    "Ibcast",
    "Init",
    "Initialized",
    "allreduce",
    "allreduce_gradients",
    "bcast",
    "disable_cudampi_support",
    "fluxmpi_print",
    "fluxmpi_println",
    "local_rank",
    "reduce",
    "synchronize",
    "total_workers",
]

_T = TypeVar("_T")


def __dir__() -> list[str]:
    return sorted(__all__)


def Init(*, gpu_devices: Sequence[int] | None = None, verbose: bool = False) -> None:
    """Start; a second call does nothing. `gpu_devices`: a GPU for each rank of a host, by default in turn."""
    if not Initialized():
        try:
            lifecycle.initialize(cuda_devices=gpu_devices)
        except Error as error:
            raise _renamed(error) from error.__cause__
    if verbose:
        fluxmpi_println("initialized")


def Initialized() -> bool:
    """Whether `Init` has been called."""
    return lifecycle.initialized()


def _renamed(error: Error) -> Error:
    """An error of `initialize` that speaks of `Init` and its argument."""
    text = re.sub(r"(samestep\.)?\binitialize\b(?=[:(])", "FluxMPI.Init", str(error))
    error.args = (text.replace("cuda_devices", "gpu_devices"), *error.args[1:])
    return error


def _world() -> Backend:
    try:
        return lifecycle.get_distributed_backend()
    except Error as error:
        raise _renamed(error) from None


def local_rank() -> int:
    """This process's number among all, from 0. (The number within its host is `Backend.local_rank`.)"""
    return _world().rank


def total_workers() -> int:
    """How many processes there are."""
    return _world().size


def synchronize(tree: _T, *, root_rank: int = 0) -> _T:
    """Give every rank root's values; see `samestep.synchronize`."""
    return broadcast.synchronize(_world(), tree, root=root_rank)


def allreduce(x: _T, op: Op = "sum") -> _T:
    """Reduce over all ranks; see `Backend.allreduce`."""
    return _world().allreduce(x, op)


def bcast(x: _T, root_rank: int = 0) -> _T:
    """Give every rank root's array; see `Backend.bcast`."""
    return _world().bcast(x, root=root_rank)


def reduce(x: _T, op: Op = "sum", root_rank: int = 0) -> _T:
    """Reduce to root; elsewhere `x` stays as it is. See `Backend.reduce`."""
    return _world().reduce(x, op, root=root_rank)


def Iallreduce(x: _T, op: Op = "sum") -> Work[_T]:
    """`allreduce` without waiting: the result is that of `.wait()`."""
    return _world().iallreduce(x, op)


def Ibcast(x: _T, root_rank: int = 0) -> Work[_T]:
    """`bcast` without waiting: the result is that of `.wait()`."""
    return _world().ibcast(x, root=root_rank)


def allreduce_gradients(grads: _T) -> _T:
    """The sum of gradients over all ranks; see `samestep.allreduce_gradients`, whose default is the mean."""
    return gradients.allreduce_gradients(_world(), grads, ReduceOp.SUM)


def DistributedOptimizer(opt: _T) -> _T:
    """`opt` with summed gradients; see `samestep.DistributedOptimizer`, whose default is the mean."""
    return optimizer.DistributedOptimizer(_world(), opt, op=ReduceOp.SUM)


def DistributedDataContainer(items: Any) -> data.DistributedDataContainer:
    """This rank's part of the data; see `samestep.DistributedDataContainer`."""
    return data.DistributedDataContainer(_world(), items)


def fluxmpi_println(*args: Any) -> None:
    """Print a line per rank, in order of rank, with the time. Before `Init`: only this process's own."""
    fluxmpi_print(*args, "\n")


def fluxmpi_print(*args: Any) -> None:
    """As `fluxmpi_println` without ending the line. As in Julia, no spaces are put between arguments."""
    text = "".join(map(str, args))
    end = "\n" if text.endswith("\n") else ""
    if Initialized():
        with _core.UserCall("fluxmpi_println" if end else "fluxmpi_print"):
            printing.write(_world(), text.removesuffix("\n"), end=end)
    else:
        sys.stdout.write(f"{printing.now()} {text}")


def disable_cudampi_support(*, disable: bool = True) -> None:
    """Keep device memory from MPI, which is the default here. For the next `Init`.

    The same as the variable `SAMESTEP_GPU_AWARE_MPI` set to 0. Device arrays are accepted in both cases: they are
    staged through host memory, or use NCCL.

    Args:
      disable: False takes this back, and leaves it to the MPI library: `auto`.
    """
    _settings.set_here(_settings.GPU_AWARE_MPI, "0" if disable else "auto")

"""Synchronous data-parallel training with any array library over any transport.

import samestep as ss

backend = ss.initialize()
params = ss.synchronize(backend, params)
data = ss.DistributedDataContainer(backend, data)
opt = ss.DistributedOptimizer(backend, opt)
"""

from samestep.backend import Backend, MPIBackend, NativeBackend, NCCLBackend
from samestep.data import DistributedDataContainer, DistributedSampler, Shard
from samestep.errors import (
    Error,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    StepError,
    TimeoutError,
    UnavailableError,
)
from samestep.functions import (
    all,  # noqa: F401 - not in __all__, for the sake of `import *`
    all_finite,
    allgather,
    allreduce,
    allreduce_tree,
    alltoall,
    any,  # noqa: F401
    barrier,
    bcast,
    gather,
    iallgather,
    iallreduce,
    ialltoall,
    ibarrier,
    ibcast,
    igather,
    irecv,
    ireduce,
    ireduce_scatter,
    iscatter,
    isend,
    local_rank,
    local_size,
    node_count,
    node_rank,
    println,
    rank,
    recv,
    reduce,
    reduce_scatter,
    same,
    scatter,
    send,
    together,
    total_workers,
)
from samestep.group.objects import ANY
from samestep.group.work import Status, Work
from samestep.notebook import (
    launch,
    load_ipython_extension,  # noqa: F401 - for %load_ext
    unload_ipython_extension,  # noqa: F401
)
from samestep.optimizer import DistributedOptimizer, ShardedOptimizer
from samestep.reduce_ops import (
    AVG,
    BAND,
    BOR,
    BXOR,
    LAND,
    LOR,
    MAX,
    MIN,
    PROD,
    SUM,
    ReduceOp,
    premul,
)
from samestep.step import Accumulator, gather_metrics, metric_mean, steps
from samestep.step.gradients import allreduce_gradients
from samestep.trees.broadcast import synchronize
from samestep.world.lifecycle import finalize, get_distributed_backend, initialize, initialized, missing

avg = AVG
"""Lux's name of the averaging operator."""

__version__ = "0.1.0"

_MODULES = (
    "data",
    "distributed",
    "errors",
    "fluxmpi",
    "multiprocessing",
    "optimizer",
    "testing",
    "torch",
)


def __dir__() -> list[str]:
    """Public names, and public modules that have been imported."""
    return sorted(["__version__", *__all__, *(name for name in _MODULES if name in globals())])


__all__ = [
    "ANY",
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "LAND",
    "LOR",
    "MAX",
    "MIN",
    "PROD",
    "SUM",
    "Accumulator",
    "Backend",
    "DistributedDataContainer",
    "DistributedOptimizer",
    "DistributedSampler",
    "Error",
    "InvalidArgumentError",
    "MPIBackend",
    "MismatchError",
    "NCCLBackend",
    "NativeBackend",
    "NotInitializedError",
    "PeerLostError",
    "ReduceOp",
    "Shard",
    "ShardedOptimizer",
    "Status",
    "StepError",
    "TimeoutError",
    "UnavailableError",
    "Work",
    "all_finite",
    "allgather",
    "allreduce",
    "allreduce_gradients",
    "allreduce_tree",
    "alltoall",
    "avg",
    "barrier",
    "bcast",
    "finalize",
    "gather",
    "gather_metrics",
    "get_distributed_backend",
    "iallgather",
    "iallreduce",
    "ialltoall",
    "ibarrier",
    "ibcast",
    "igather",
    "initialize",
    "initialized",
    "irecv",
    "ireduce",
    "ireduce_scatter",
    "iscatter",
    "isend",
    "launch",
    "local_rank",
    "local_size",
    "metric_mean",
    "missing",
    "node_count",
    "node_rank",
    "premul",
    "println",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "same",
    "scatter",
    "send",
    "steps",
    "synchronize",
    "together",
    "total_workers",
]

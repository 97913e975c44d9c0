"""Synchronous data-parallel training with any array library over any transport.

import samestep as ss

backend = ss.initialize()
params = ss.synchronize(backend, params)
data = ss.DistributedDataContainer(backend, data)
opt = ss.DistributedOptimizer(backend, opt)
"""

from samestep.backend import Backend, MPIBackend, NativeBackend, NCCLBackend
from samestep.data import DistributedDataContainer, DistributedSampler
from samestep.errors import (
    Error,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    TimeoutError,
    UnavailableError,
)
from samestep.functions import (
    allgather,
    allreduce,
    allreduce_tree,
    alltoall,
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
    scatter,
    send,
    total_workers,
)
from samestep.gradients import allreduce_gradients
from samestep.objects import ANY
from samestep.optimizer import DistributedOptimizer
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
from samestep.synchronization import synchronize
from samestep.work import Status, Work
from samestep.world import finalize, get_distributed_backend, initialize, initialized, missing

avg = AVG
"""Lux's name of the averaging operator."""

__version__ = "0.1.0"

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
    "Status",
    "TimeoutError",
    "UnavailableError",
    "Work",
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
    "local_rank",
    "local_size",
    "missing",
    "node_count",
    "node_rank",
    "premul",
    "println",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "synchronize",
    "total_workers",
]

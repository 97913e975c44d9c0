from samestep import data as data
from samestep import errors as errors
from samestep import optimizer as optimizer
from samestep.backend import *
from samestep.data import *
from samestep.errors import *
from samestep.functions import *
from samestep.group.objects import ANY
from samestep.group.work import Status, Work
from samestep.notebook import launch
from samestep.notebook import load_ipython_extension as load_ipython_extension
from samestep.notebook import unload_ipython_extension as unload_ipython_extension
from samestep.optimizer import DistributedOptimizer, ShardedOptimizer
from samestep.reduce_ops import *
from samestep.step import *
from samestep.step.gradients import allreduce_gradients
from samestep.train_state import TrainState
from samestep.trees.broadcast import synchronize
from samestep.world.lifecycle import finalize, get_distributed_backend, initialize, initialized, missing

__version__: str

# fmt: off
__all__ = [
    "ANY", "AVG", "Accumulator", "BAND", "BOR", "BXOR", "Backend", "DistributedDataContainer",
    "DistributedOptimizer", "DistributedSampler", "Error", "InvalidArgumentError", "LAND", "LOR", "MAX", "MIN",
    "MPIBackend", "MismatchError", "NCCLBackend", "NativeBackend", "NotInitializedError", "PROD",
    "PeerLostError", "ReduceOp", "SUM", "Shard", "ShardedOptimizer", "Status", "StepError", "TimeoutError",
    "TrainState", "UnavailableError", "Work", "all_finite", "allgather", "allreduce", "allreduce_gradients",
    "allreduce_tree", "alltoall", "avg", "barrier", "bcast", "finalize", "gather", "gather_metrics",
    "get_distributed_backend", "iallgather", "iallreduce", "ialltoall", "ibarrier", "ibcast", "igather",
    "initialize", "initialized", "irecv", "ireduce", "ireduce_scatter", "iscatter", "isend", "launch",
    "local_rank", "local_size", "metric_mean", "missing", "node_count", "node_rank", "premul", "println",
    "rank", "recv", "reduce", "reduce_scatter", "same", "scatter", "send", "steps", "synchronize", "together",
    "total_workers"
]

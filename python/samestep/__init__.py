"""Synchronous data-parallel training with any array library over any transport.

import samestep as ss

backend = ss.initialize()
params = ss.synchronize(backend, params)
data = ss.DistributedDataContainer(backend, data)
opt = ss.DistributedOptimizer(backend, opt)
"""

import importlib

from samestep import _settings, launch

# The function of this name is `notebook.launch`. The import of the package, above, sets the attribute once.
del launch

__version__ = _settings.VERSION

# The module of each public name, imported at first use: the launcher and the entry points of torch and JAX need neither
# NumPy nor the core. Type checkers read `__init__.pyi`.
_NAMES = {
    "backend": "Backend MPIBackend NCCLBackend NativeBackend",
    "data": "DistributedDataContainer DistributedSampler Shard",
    "errors": "Error InvalidArgumentError MismatchError NotInitializedError PeerLostError StepError TimeoutError "
    "UnavailableError",
    "functions": "all_finite allgather allreduce allreduce_tree alltoall barrier bcast gather iallgather iallreduce "
    "ialltoall ibarrier ibcast igather irecv ireduce ireduce_scatter iscatter isend local_rank local_size node_count "
    "node_rank println rank recv reduce reduce_scatter same scatter send together total_workers",
    "group.objects": "ANY",
    "group.work": "Status Work",
    "notebook": "launch",
    "optimizer": "DistributedOptimizer ShardedOptimizer",
    "reduce_ops": "AVG BAND BOR BXOR LAND LOR MAX MIN PROD SUM ReduceOp avg premul",
    "step": "Accumulator gather_metrics metric_mean steps",
    "step.gradients": "allreduce_gradients",
    "train_state": "TrainState",
    "trees.broadcast": "synchronize",
    "world.lifecycle": "finalize get_distributed_backend initialize initialized missing",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
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

__all__ = sorted(_HOMES)  # noqa: PLE0605

# Without a place in `import *`: two names of builtins, and what `%load_ext samestep` calls.
_HOMES |= {"all": "functions", "any": "functions"}
_HOMES |= dict.fromkeys(("load_ipython_extension", "unload_ipython_extension"), "notebook")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"samestep.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"samestep.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    """Public names, and public modules that have been imported."""
    return sorted(["__version__", *__all__, *(name for name in _MODULES if name in globals())])

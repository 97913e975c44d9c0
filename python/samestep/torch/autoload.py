"""Called by `import torch` through the entry point "torch.backends": registers the name "samestep".

It must cost nothing and never fail: it imports neither NumPy nor the extension module, and a torch without
`torch.distributed` is no error. It changes nothing else until a program asks for the backend.
"""

import functools
import inspect
import os
from typing import Any

from samestep import _settings

_NAME = "samestep"


def autoload() -> None:
    """Registers the backend. Idempotent; never raises."""
    try:
        import torch.distributed as dist

        if not dist.is_available() or _NAME in dist.Backend.backend_list:
            return
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])
        dist.Backend.SAMESTEP = _Name()
        replaces = _settings.get(_settings.REPLACE_GLOO) not in (None, "", "0")
        if replaces or _settings.get(_settings.ERROR_FILE) is not None:
            prepare()
        if replaces:
            replace(dist, _NAME)
    except Exception as error:  # torch would refuse to be imported
        import warnings

        warnings.warn(f"samestep is not a backend of this torch: {error!r}", stacklevel=2)


class _Name:
    """`Backend.SAMESTEP`, which torch reads when a program names the backend, before its ranks meet."""

    def __get__(self, _: Any, owner: Any) -> str:
        owner.SAMESTEP = _NAME
        prepare()
        return _NAME


def _create(options: Any, backend_options: Any = None) -> Any:
    from samestep.torch.process_group import create

    return create(options, backend_options)


@functools.cache
def prepare() -> None:
    """For a program that asks for the backend: lets `env://` work under mpirun and srun. Idempotent.

    Launchers of MPI and Slurm tell ranks who they are, but set no `RANK`. A script that nothing has launched meets
    there, too: it is a world of one.
    """
    import importlib

    import torch.distributed as dist

    if not dist.is_available():
        return
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    usual = handlers["env"]

    def env(url: str, **how: Any) -> Any:
        ranks = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
        launched = any(name in os.environ for name in ranks)
        # With one of these set, somebody forgot the other variables of several ranks, which torch's own handler says.
        partly = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        alone = "world_size=" not in url and not any(name in os.environ for name in partly)
        has_rank = "RANK" in os.environ
        if (has_rank and not launched) or "rank=" in url or not (launched or alone):
            return usual(url, **how)
        if has_rank:
            from samestep._util import launchers

            if "RANK" in launchers.own_variables():  # of the launcher of this process, not of one around that
                return usual(url, **how)
        return _meet(url, **how)

    handlers["env"] = env
    handlers.setdefault("mpi", _meet)


def _meet(url: str, **how: Any) -> Any:
    from samestep.torch.launchers import rendezvous_handler

    return rendezvous_handler(url, **how)


def replace(dist: Any, name: str) -> None:
    """Makes `init_process_group` and `new_group` start the backend `name` for gloo, alone or for the CPU of several.

    Libraries such as Accelerate name gloo themselves and refuse all they do not know, and those that train on GPUs open
    groups of gloo for what they exchange on the host. Before torch 2.14 `batch_isend_irecv` does not
    coalesce the operations of a group in Python, which NCCL may need, so that "cpu:gloo,cuda:nccl" stays what it is.
    """
    per_device = "rank" in (dist.Backend.__init__.__doc__ or "")
    for function in ("init_process_group", "new_group"):
        replacing = _replacing(getattr(dist, function), name, per_device)
        setattr(dist, function, replacing)
        setattr(dist.distributed_c10d, function, replacing)


def _replacing(usual: Any, name: str, per_device: bool) -> Any:
    signature = inspect.signature(usual)

    @functools.wraps(usual)
    def start(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options)
        if "backend" in given.arguments:
            given.arguments["backend"] = _name(given.arguments["backend"], name, per_device)
        return usual(*given.args, **given.kwargs)

    return start


def _name(backend: Any, name: str, per_device: bool) -> Any:
    parts = str(backend).lower().split(",")
    if parts == ["gloo"]:
        return name
    if per_device and "cpu:gloo" in parts:
        return ",".join(f"cpu:{name}" if part == "cpu:gloo" else part for part in parts)
    return backend

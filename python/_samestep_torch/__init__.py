"""Called by `import torch` through the entry point "torch.backends": registers the name "samestep".

A package of its own because it must cost nothing and never fail: it imports neither NumPy nor the extension module,
which `import samestep` would do, and a torch without `torch.distributed` is no error.
"""

import os
from typing import Any

from _samestep_torch import gloo, no_mpi

_NAME = "samestep"


def autoload() -> None:
    """Registers the backend and what lets `env://` work under mpirun and srun. Idempotent; never raises."""
    try:
        import torch.distributed as dist

        if not dist.is_available() or _NAME.upper() in dist.Backend._plugins:
            return
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])
        _serve_launchers()
        no_mpi.install()
        if os.environ.get(gloo.VARIABLE, "") not in ("", "0"):
            gloo.replace(dist, _NAME)
    except Exception as error:  # torch would refuse to be imported
        import warnings

        warnings.warn(f"samestep is not a backend of this torch: {error!r}", stacklevel=2)


def _create(options: Any, backend_options: Any = None) -> Any:
    from samestep.torch.process_group import create

    return create(options, backend_options)


def _serve_launchers() -> None:
    """Of MPI and of Slurm, which tell ranks who they are, but set no `RANK`: `env://` meets there, too.

    So does a script that nothing has launched: it is a world of one.

    torch does not tell a handler what it meets for, so the handler looks: groups of other backends meet as ever.
    """
    import importlib

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
        if _NAME not in _backend_that_meets() or (has_rank and _rank_is_own()):
            return usual(url, **how)
        return _meet(url, **how)

    handlers["env"] = env
    handlers.setdefault("mpi", _meet)


def _rank_is_own() -> bool:
    """Whether `RANK` is of the launcher that has started this process, not of one around that."""
    from samestep._util import launchers

    return "RANK" in launchers.own_variables()


def _backend_that_meets() -> str:
    """What `init_process_group`, the caller, was asked for; "" where it is not found."""
    import sys

    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "init_process_group":
            return str(frame.f_locals.get("backend", "")).lower()
    return ""


def _meet(url: str, **how: Any) -> Any:
    from samestep.torch.launchers import rendezvous_handler

    return rendezvous_handler(url, **how)

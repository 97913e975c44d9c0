"""What `import torch` calls, by the entry point "torch.backends": makes the name "samestep" known.

A package of its own because it must cost nothing and never fail: it imports neither NumPy nor the extension module,
which `import samestep` would do, and a torch without `torch.distributed` is no error.
"""

from typing import Any

_NAME = "samestep"


def autoload() -> None:
    """Registers the backend and what lets `env://` work under mpirun and srun. Idempotent; never raises."""
    try:
        import torch.distributed as dist

        if not dist.is_available() or _NAME.upper() in dist.Backend._plugins:
            return
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])
        _serve_launchers()
    except Exception as error:  # torch would refuse to be imported
        import warnings

        warnings.warn(f"samestep is no backend of this torch: {error!r}", stacklevel=2)


def _create(options: Any, backend_options: Any = None) -> Any:
    from samestep.torch.process_group import create

    return create(options, backend_options)


def _serve_launchers() -> None:
    """Of MPI and of Slurm, which tell ranks who they are, but set no `RANK`: `env://` meets there, too.

    torch does not tell a handler what it meets for, so the handler looks: groups of other backends meet as ever.
    """
    import importlib

    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    usual = handlers["env"]

    def env(url: str, **how: Any) -> Any:
        import os

        ranks = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
        if "RANK" in os.environ or "rank=" in url or not any(name in os.environ for name in ranks):
            return usual(url, **how)
        if _NAME not in _backend_that_meets():
            return usual(url, **how)
        return _meet(url, **how)

    handlers["env"] = env
    handlers.setdefault("mpi", _meet)


def _backend_that_meets() -> str:
    """What `init_process_group`, further up, was asked for; "" where it is not found."""
    import sys

    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "init_process_group":
            return str(frame.f_locals.get("backend", "")).lower()
    return ""


def _meet(url: str, **how: Any) -> Any:
    from samestep.torch.launchers import meet

    return meet(url, **how)

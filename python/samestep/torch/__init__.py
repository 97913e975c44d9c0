"""A backend for `torch.distributed`: `init_process_group("samestep")` in a script that is otherwise unchanged.

Installing samestep makes torch know the name; nothing has to be imported. `register` does the same by hand, for a
torch that does not load backends (`TORCH_DEVICE_BACKEND_AUTOLOAD=0`).
"""

from samestep.torch import autoload as _autoload

__all__ = ["register"]


def register() -> None:
    """Make `torch.distributed` know the backend "samestep", as importing torch does, and prepare for its use.

    Without this call the first use of the name prepares: `env://` then meets under mpirun and srun too. Idempotent.

    Example:
      >>> import samestep.torch, torch.distributed as dist
      >>> samestep.torch.register()
      >>> dist.is_backend_available("samestep")
      True
    """
    _autoload.autoload()
    _autoload.prepare()

"""The store of torchrun's agent, which listens at MASTER_PORT instead of rank 0."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

from samestep.errors import UnavailableError
from samestep.rendezvous.store import Store
from samestep.rendezvous.tcp_address import address_text

__all__ = ["agent_store"]

_FRESH = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
_numbers = itertools.count()  # of meetings of this process, which all ranks have in one order


def agent_store(host: str, port: int, timeout: float) -> Store | None:
    """A part of that store for one rendezvous; None if torchrun keeps none, as in jobs of other launchers.

    Raises:
      UnavailableError: the store does not answer, or this environment has no torch.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    where = f"the store of torchrun at {address_text(host, port)}"
    try:
        import torch.distributed as dist

        from samestep.rendezvous.torch_store import TorchStore
    except ImportError as error:
        raise UnavailableError(f"{where} is reached with torch, which is not here: {error}") from error
    try:
        store = dist.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False
        )
    except dist.DistError as error:
        raise UnavailableError(f"{where} does not answer: {error}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    rendezvous = TorchStore(dist.PrefixStore(f"samestep/{attempt}/{next(_numbers)}", store), timeout)
    rendezvous.where = (
        f"{where}, which keeps who has joined over restarts, unless it is started with {_FRESH}"
    )
    return rendezvous

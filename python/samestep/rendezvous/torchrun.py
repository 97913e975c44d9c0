"""The store of torch that listens at MASTER_PORT already: of torchrun's agent, or of a group in this process."""

from __future__ import annotations

import itertools
import sys
from datetime import timedelta
from typing import Any

from samestep._util import launchers
from samestep.errors import UnavailableError
from samestep.rendezvous.store import Store
from samestep.rendezvous.tcp_address import address_text
from samestep.rendezvous.url import Method

_FRESH = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
_numbers = itertools.count()  # of meetings of this process, which all ranks have in one order
# Stores beside a group, by host and port. On rank 0 they listen as long as they are here.
_kept: dict[tuple[str, int], Any] = {}


def store_of_torch(how: Method, timeout: float) -> Store | None:
    """A part of that store for one rendezvous; None where rank 0 is to keep a store of samestep.

    All ranks decide alike: torchrun has started all of them, or all are in a group of `init_process_group`.

    Raises:
      UnavailableError: the store does not answer, or this environment has no torch.
    """
    env = launchers.own_variables()
    of_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = (how.host or "localhost", how.port)
    if not of_agent and place not in _kept and not _is_in_group():
        return None
    where = f"the store of {'torchrun' if of_agent else 'torch'} at {address_text(*place)}"
    try:
        import torch.distributed as dist

        from samestep.rendezvous.torch_store import TorchStore

        store = _kept.get(place) or _open(place, timeout, is_master=how.rank == 0 and not of_agent)
    except ImportError as error:
        raise UnavailableError(f"{where} is reached with torch, which is not here: {error}") from error
    except dist.DistError as error:
        raise UnavailableError(f"{where} does not answer: {error}") from error
    if not of_agent:
        _kept[place] = store
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    rendezvous = TorchStore(dist.PrefixStore(f"samestep/{attempt}/{next(_numbers)}", store), timeout)
    rendezvous.where = where
    if of_agent:
        rendezvous.where += f", which remembers the members over restarts, unless it is started with {_FRESH}"
    return rendezvous


def _open(place: tuple[str, int], timeout: float, *, is_master: bool) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(
        *place,
        is_master=is_master,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,  # with the store of the group, where that is here
    )


def _is_in_group() -> bool:
    """Whether this process has called `torch.distributed.init_process_group`."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()

"""How the devices of a JAX program find each other.

JAX's own distributed client says which process this is and has a store of keys and values; it exists before the first
collective does. Process 0 opens a store of samestep, and tells its port there, and a key where `SAMESTEP_SECRET` is not
set; the ranks meet at it as anywhere. Each device is a rank, so a process with several devices has several.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from samestep import _core, _settings
from samestep._util import handshake
from samestep._util.json_layout import loads
from samestep.group import trust
from samestep.rendezvous import same_user
from samestep.rendezvous.rendezvous import join
from samestep.rendezvous.tcp_store import TCPStore
from samestep.world import lifecycle, native_world

_PREFIX = "samestep"
_READABLE = (
    "the ranks know each other by a key in JAX's own store, which every process that reaches JAX's coordinator at %s "
    "can read; give all processes one secret, as by `export SAMESTEP_SECRET=$(openssl rand -hex 16)`, or set "
    f"{_settings.TRUST_NETWORK}=1 in a network that only you can reach (docs/security.md)"
)

_XLA_THREADS = ("PJRT_NPROC", "NPROC")  # in the order in which XLA looks at them

_kept: list[Any] = []  # what has to live as long as the ranks


def open_ranks() -> tuple[Any, float]:
    """Brings the devices of all processes together. Collective; called by the library that jaxlib has loaded.

    Returns:
      A capsule with a group of all devices for each device of this process, and the seconds that an operation may take.

    Raises:
      TimeoutError: names the ranks that did not join.
      UnavailableError: ranks cannot reach each other, or there is no distributed client.
    """
    from jax._src import distributed

    from samestep.jax import float16

    float16.install()
    timeout = lifecycle._seconds("timeout", None, _settings.TIMEOUT, lifecycle.DEFAULT_TIMEOUT)
    lifecycle.prepare_core()
    state: Any = distributed.global_state
    client, process, n_processes = state.client, int(state.process_id), int(state.num_processes)
    mine = _local_devices()
    _size_xla_thread_pool(mine)
    store, place, secret = _open_store(client, process, str(state.coordinator_address), timeout)
    client.key_value_set(f"{_PREFIX}/devices/{process}", str(mine))
    counts = [int(_get(client, f"devices/{other}", timeout)) for other in range(n_processes)]
    first = sum(counts[:process])

    def open_rank(rank: int) -> _core.Communicator:
        own = store if rank == 0 else None
        with_all = join(
            own or TCPStore(*place, timeout=timeout, secret=secret), rank, sum(counts), timeout, owned=True
        )
        group = native_world.group_over(with_all, timeout, "jax")
        _kept.extend((with_all, group.bootstrap_comm))
        return group.comm

    with ThreadPoolExecutor(mine) as pool:
        ranks = list(pool.map(open_rank, range(first, first + mine)))
    return _core.capsule_of(ranks), timeout


def _open_store(
    client: Any, process: int, coordinator: str, timeout: float
) -> tuple[TCPStore | None, tuple[str, int], bytes]:
    """The store at which all meet, where it is, and its secret.

    It is process 0's, on the host of JAX's coordinator, which is process 0 as well.
    """
    host, secret = coordinator.rpartition(":")[0].strip("[]"), handshake.job_secret()
    if process != 0:
        port, told = loads(_get(client, "store", timeout).encode(), [int, str])
        return None, (host, port), told.encode() or secret
    told = "" if secret else secrets.token_hex(16)
    if told and not same_user.is_loopback(host) and not trust.trusts(False):
        logging.getLogger("samestep").warning(_READABLE, coordinator)
    secret = secret or told.encode()
    store = TCPStore(host, 0, is_master=True, timeout=timeout, secret=secret)
    client.key_value_set(f"{_PREFIX}/store", json.dumps([store.port, told]))
    return store, (host, store.port), secret


def _get(client: Any, key: str, timeout: float) -> str:
    return str(client.blocking_key_value_get(f"{_PREFIX}/{key}", int(timeout * 1000)))


def _local_devices() -> int:
    """How many devices XLA is about to make of this process's CPU, as jax.config and XLA_FLAGS say."""
    from jax._src import xla_bridge

    asked = getattr(xla_bridge, "num_cpu_devices", None)
    if asked is not None and asked.value > 0:
        return int(asked.value)
    flag = re.findall(r"--xla_force_host_platform_device_count[= ](\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(flag[-1]) if flag else 1


def _size_xla_thread_pool(n_devices: int) -> None:
    """Gives XLA enough threads for collectives of several devices of this process.

    XLA has one pool for all of a process: as many threads as processors, or as devices if those are more. A collective
    of a device holds a thread while it waits for the others; the dispatch of a later program holds one for each device
    that has 32 programs in progress; and the devices that are waited for need threads to compute. XLA makes the pool
    after the ranks are open, and asks for its size by these variables alone.
    """
    if n_devices > 1 and not any(name in os.environ for name in _XLA_THREADS):
        os.environ[_XLA_THREADS[0]] = str(2 * n_devices + len(os.sched_getaffinity(0)))

"""How the devices of a JAX program find each other.

JAX's own distributed client says which process this is and has a store of keys and values; it exists before the first
collective does. Process 0 opens a store of samestep, tells its port there, and the ranks meet at it as anywhere. Each
device is a rank, so a process with several devices has several.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from samestep import _core, _settings
from samestep.rendezvous.rendezvous import join
from samestep.rendezvous.tcp_store import TCPStore
from samestep.world import bootstrap_native, lifecycle

__all__ = ["open_ranks"]

_PREFIX = "samestep"

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
    store, port = _open_store(client, process, str(state.coordinator_address), timeout)
    client.key_value_set(f"{_PREFIX}/devices/{process}", str(mine))
    counts = [int(_get(client, f"devices/{other}", timeout)) for other in range(n_processes)]
    first = sum(counts[:process])

    def open_rank(rank: int) -> _core.Communicator:
        store_of_rank = (
            store if store is not None and rank == 0 else TCPStore(port[0], port[1], timeout=timeout)
        )
        with_all = join(store_of_rank, rank, sum(counts), timeout, owned=True)
        group = bootstrap_native.group_over(with_all, timeout, "jax")
        _kept.extend((with_all, group.bootstrap_comm))
        return group.comm

    with ThreadPoolExecutor(mine) as pool:
        ranks = list(pool.map(open_rank, range(first, first + mine)))
    return _core.capsule_of(ranks), timeout


def _open_store(
    client: Any, process: int, coordinator: str, timeout: float
) -> tuple[TCPStore | None, tuple[str, int]]:
    """The store at which all meet: process 0's, on the host of JAX's coordinator, which is process 0 as well."""
    host = coordinator.rpartition(":")[0].strip("[]")
    if process != 0:
        return None, (host, int(_get(client, "port", timeout)))
    store = TCPStore(host, 0, is_master=True, timeout=timeout)
    client.key_value_set(f"{_PREFIX}/port", str(store.port))
    return store, (host, store.port)


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

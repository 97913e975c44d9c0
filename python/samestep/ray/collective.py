"""A backend of `ray.util.collective`: actors call collectives on NumPy arrays and torch tensors."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import numpy as np
import ray
from ray.experimental import internal_kv
from ray.util.collective import backend_registry
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)

from samestep import _settings
from samestep._util.json_layout import loads
from samestep.backend import Backend, NativeBackend
from samestep.errors import InvalidArgumentError, TimeoutError
from samestep.rendezvous.rendezvous import join
from samestep.rendezvous.tcp_store import TCPStore
from samestep.world import lifecycle, native_world

NAME = "SAMESTEP"
_POLL_S = 0.05
_OPERATORS: dict[Any, Any] = {
    ReduceOp.SUM: "sum",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}


def register_collective_backend() -> None:
    """Makes `backend="samestep"` known to `ray.util.collective` in this process. May be called again.

    The driver and every actor call it before a group is created, as Ray asks for every backend that is not its own.

    Example:
      >>> import samestep.ray
      >>> @ray.remote  # doctest: +SKIP
      ... class Worker:
      ...     def __init__(self, rank, size):
      ...         samestep.ray.register_collective_backend()
      ...         ray.util.collective.init_collective_group(size, rank, "samestep", "workers")
      ...     def total(self, x):
      ...         x = x.copy()  # arguments of an actor are read-only
      ...         ray.util.collective.allreduce(x, "workers")
      ...         return x
    """
    if not backend_registry._global_registry.is_registered(NAME):
        backend_registry.register_collective_backend(NAME, _Group)


class _Group(BaseGroup):
    """The actors of one group. Each has a world of its own, so that a process may belong to several."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._backend = _open(world_size, rank, group_name)

    @classmethod
    def backend(cls) -> str:
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def destroy_group(self) -> None:
        self._backend.close()

    def allreduce(self, tensors: list[Any], options: Any = AllReduceOptions) -> None:
        x = _only(tensors, "allreduce")
        self._backend.allreduce(x, _OPERATORS[options.reduceOp], out=x)

    def reduce(self, tensors: list[Any], options: Any = ReduceOptions) -> None:
        x = _only(tensors, "reduce")
        out = x if self.rank == options.root_rank else None
        self._backend.reduce(x, _OPERATORS[options.reduceOp], root=options.root_rank, out=out)

    def broadcast(self, tensors: list[Any], options: Any = BroadcastOptions) -> None:
        x = _only(tensors, "broadcast")
        self._backend.bcast(x, root=options.root_rank, out=x)

    def allgather(
        self, outputs: list[list[Any]], tensors: list[Any], options: Any = AllGatherOptions
    ) -> None:
        gathered = self._backend.allgather(_only(tensors, "allgather"))
        for rank, out in enumerate(_only(outputs, "allgather")):
            out[...] = gathered[rank]

    def reducescatter(
        self, outputs: list[Any], tensors: list[list[Any]], options: Any = ReduceScatterOptions
    ) -> None:
        out = _only(outputs, "reducescatter")
        blocks = _stacked(_only(tensors, "reducescatter"))
        out[...] = self._backend.reduce_scatter(blocks, _OPERATORS[options.reduceOp])

    def send(self, tensors: list[Any], options: Any = SendOptions) -> None:
        self._backend.send(_only(tensors, "send"), options.dst_rank)

    def recv(self, tensors: list[Any], options: Any = RecvOptions) -> None:
        self._backend.recv(_only(tensors, "recv"), options.src_rank)

    def barrier(self, options: Any = BarrierOptions) -> None:
        self._backend.barrier()


def _only(tensors: list[Any], verb: str) -> Any:
    if len(tensors) != 1:
        raise InvalidArgumentError(
            f"{verb}: {len(tensors)} tensors, for several devices of an actor; samestep takes one of each actor"
        )
    return tensors[0]


def _stacked(blocks: list[Any]) -> Any:
    """One array of the blocks, of their own library."""
    if type(blocks[0]).__module__.partition(".")[0] == "torch":
        import torch

        return torch.stack(blocks)
    return np.stack(blocks)


def _open(size: int, rank: int, name: str) -> Backend:
    """Brings the actors of a group together. Collective over them.

    Rank 0 opens a store on its node, and tells its address and the secret of the group in Ray's key-value store, which
    only the cluster reads.
    """
    timeout = lifecycle._seconds("timeout", None, _settings.TIMEOUT, lifecycle.DEFAULT_TIMEOUT)
    lifecycle.prepare_core()
    key = f"samestep collective group {name}".encode()
    if rank == 0:
        host, secret = ray.util.get_node_ip_address(), secrets.token_hex(16)
        store = TCPStore(host, 0, is_master=True, timeout=timeout, secret=secret.encode())
        internal_kv._internal_kv_put(key, json.dumps([host, store.port, secret]).encode(), overwrite=True)
    else:
        host, port, secret = loads(_wait_for(key, name, timeout), [str, int, str])
        store = TCPStore(host, port, timeout=timeout, secret=secret.encode())
    try:
        rendezvous = join(store, rank, size, timeout)
        opened = native_world.group_over(rendezvous, timeout, name)
    finally:
        if rank == 0:
            internal_kv._internal_kv_del(key)
        store.close()
    return opened._replace(trusted=True).as_backend(NativeBackend, timeout)


def _wait_for(key: bytes, name: str, timeout: float) -> bytes:
    end = time.monotonic() + timeout
    while (value := internal_kv._internal_kv_get(key)) is None:
        if time.monotonic() > end:
            raise TimeoutError(f"group {name!r}: rank 0 did not create the group within {timeout:g} s")
        time.sleep(_POLL_S)
    return bytes(value)

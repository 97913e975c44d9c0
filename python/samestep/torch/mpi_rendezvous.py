"""`init_process_group` under mpirun, which tells ranks who they are, but not where a store is."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from samestep import _core, facts
from samestep.errors import InvalidArgumentError
from samestep.rendezvous import mpi_world

__all__ = ["meet"]


def meet(url: str, timeout: timedelta = timedelta(minutes=30), **_: Any) -> Iterator[tuple[Any, int, int]]:
    """A handler of torch for `mpi://`, and for `env://` where an MPI launcher has set no `RANK`.

    Rank 0 keeps a store at a free port, and tells the others over MPI. `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
    `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` are set afterwards where they are not, as torchrun does before.

    Yields:
      The store, this rank, and how many there are.

    Raises:
      UnavailableError: MPI cannot be loaded, or is not that of the launcher, whose ranks would each be alone.
      InvalidArgumentError: the URL says another rank or size.
    """
    loaded = mpi_world.load()
    started = facts.gather(probe_mpi=False, cuda=False, hip=False)
    _core.check_launch(started, _core.World(size=loaded.size, library=loaded.description))
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    _check_claims(url, {"rank": rank, "world_size": size})
    everywhere = world.allgather(socket.gethostname())
    host = "127.0.0.1" if len(set(everywhere)) == 1 else everywhere[0]
    store = dist.TCPStore(host, 0, size, True, timeout, wait_for_workers=False) if rank == 0 else None
    port = world.bcast(store.port if store is not None else 0, 0)
    if store is None:
        store = dist.TCPStore(host, port, size, False, timeout, wait_for_workers=False)
    same_host = [r for r, name in enumerate(everywhere) if name == everywhere[rank]]
    told = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": host, "MASTER_PORT": port}
    told |= {"LOCAL_RANK": same_host.index(rank), "LOCAL_WORLD_SIZE": len(same_host)}
    for name, value in told.items():
        os.environ.setdefault(name, str(value))
    yield store, rank, size


def _check_claims(url: str, actual: dict[str, int]) -> None:
    from urllib.parse import parse_qs, urlparse

    for name, values in parse_qs(urlparse(url).query).items():
        if name in actual and int(values[-1]) != actual[name]:
            raise InvalidArgumentError(
                f"init_process_group: {name}={values[-1]} was given but the MPI launcher made it {actual[name]}; "
                f"leave {name} out"
            )

"""`init_process_group` under mpirun or srun, which give a process its rank but no store."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from samestep._util import launchers, mpi_library
from samestep.errors import UnavailableError
from samestep.group.hosts import locate
from samestep.world import mpi_world
from samestep.world.choice import check_claims, check_launch, gather


def rendezvous_handler(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """A handler of torch for `mpi://`, and for `env://` where nothing has set `RANK`: under MPI or Slurm, or alone.

    Rank 0 keeps a store: at a free port, which it tells the others over MPI or, without an MPI library, through the
    launcher; or where ranks of Slurm meet, see `slurm_meeting`. A process that no launcher has started is a world of
    one rank. `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` are set afterwards
    if they are missing, as torchrun sets them.

    Yields:
      The store, this rank, and the number of ranks.

    Raises:
      UnavailableError: MPI cannot be loaded, or is not that of the launcher, whose ranks would each be alone; or
        Slurm does not say on which hosts the ranks are.
      InvalidArgumentError: the URL says another rank or size.
    """
    started_by = launchers.launcher()
    for name in os.environ.keys() - launchers.own_variables().keys():  # of a launcher around this one
        del os.environ[name]
    if not started_by.name and not url.startswith("mpi:"):
        store, rank, size = dist.TCPStore("127.0.0.1", 0, 1, True, timeout, wait_for_workers=False), 0, 1
    elif started_by.name == "srun" and not url.startswith("mpi:"):
        _check_claims(url, {"rank": started_by.rank, "world_size": started_by.size}, "Slurm")
        store, rank, size = _at_first_host(started_by, timeout), started_by.rank, started_by.size
    elif launchers.can_meet(started_by) and not mpi_library.load().path:
        store, rank, size = _by_launcher(url, timeout)
    else:
        loaded = mpi_world.load()
        started = gather(probe_mpi=False, cuda=False, hip=False)
        check_launch(started, loaded.size, loaded.description)
        from mpi4py import MPI

        store, rank, size = _at_rank_0(url, timeout, loaded.rank, loaded.size, MPI.COMM_WORLD.allgather)
    found = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": store.host, "MASTER_PORT": store.port}
    for name, value in (
        found | _local_variables(dist.PrefixStore("samestep hosts", store), rank, size)
    ).items():
        os.environ.setdefault(name, str(value))
    yield store, rank, size


def _by_launcher(url: str, timeout: timedelta) -> tuple[dist.TCPStore, int, int]:
    """Where no MPI library loads."""
    from samestep.world import native_world

    meeting = native_world.meet_by_launcher(launchers.launcher(), timeout.total_seconds())
    try:
        gather = functools.partial(meeting.allgather_json, layout=str)
        return _at_rank_0(url, timeout, meeting.rank, meeting.size, gather)
    finally:
        meeting.close()


def _at_rank_0(
    url: str, timeout: timedelta, rank: int, size: int, allgather: Callable[[str], list[str]]
) -> tuple[dist.TCPStore, int, int]:
    """A store that rank 0 keeps at a free port."""
    _check_claims(url, {"rank": rank, "world_size": size}, "the MPI launcher")
    everywhere = allgather(socket.gethostname())
    host = "127.0.0.1" if len(set(everywhere)) == 1 else everywhere[0]
    store = dist.TCPStore(host, 0, size, True, timeout, wait_for_workers=False) if rank == 0 else None
    port = allgather(str(store.port) if store is not None else "")[0]
    if store is None:
        store = dist.TCPStore(host, int(port), size, False, timeout, wait_for_workers=False)
    return store, rank, size


def _at_first_host(started_by: launchers.Launcher, timeout: timedelta) -> dist.TCPStore:
    place = launchers.slurm_meeting() or ("", 0)
    host = os.environ.get("MASTER_ADDR", place[0])
    port = int(os.environ.get("MASTER_PORT", place[1]))
    if not host or not port:
        raise UnavailableError(
            f"init_process_group: srun started {started_by.size} ranks, but names no hosts (SLURM_STEP_NODELIST); set "
            "MASTER_ADDR and MASTER_PORT"
        )
    is_master = started_by.rank == 0
    # For samestep's own world as well, see `rendezvous.torchrun`.
    return dist.TCPStore(
        host, port, started_by.size, is_master, timeout, wait_for_workers=False, multi_tenant=True
    )


def _local_variables(store: Any, rank: int, size: int) -> dict[str, int]:
    """This rank's number among those of its host, and their number, as variables."""
    store.set(str(rank), socket.gethostname())
    here = locate([store.get(str(r)) for r in range(size)], rank)
    return {"LOCAL_RANK": here.local_rank, "LOCAL_WORLD_SIZE": here.local_size}


def _check_claims(url: str, actual: dict[str, int], by: str) -> None:
    from urllib.parse import parse_qs, urlparse

    given = parse_qs(urlparse(url).query)
    claims = [(name, int(given[name][-1]), number) for name, number in actual.items() if name in given]
    check_claims("init_process_group", by, claims)

"""What MPI needs beside it over several hosts: news of ranks that have died, and messages of the right length."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

from samestep import _core
from samestep.errors import Error
from samestep.objects import exchange_objects
from samestep.rendezvous import interfaces, mpi_world
from samestep.rendezvous.tcp_address import address_text

__all__ = ["begin"]

_BACKLOG = 4096  # connections that are never taken
_REACH_S = 5.0  # for another host to answer
_PAUSE_S = 0.1
_TRY_S = 0.7  # shorter than the kernel takes to ask once more
_EAGER_PIECE = 32 << 10


def begin(comm: _core.Communicator, hosts: Sequence[str], timeout: float) -> bool:
    """Lets `comm` and the groups made of it know which ranks have died, and how to cut long messages. Collective.

    Over TCP MPI asks before it sends what is longer than some 64 KiB (Open MPI 5), and the answer waits behind all
    that is on the line already. So there long reductions are cut into messages that go unasked: two hosts of one rank
    take 569 ms for 64 MiB at 1 Gbit/s, where messages of 256 KiB take 740 and the line alone 561
    (`benchmarks/hosts.py`, SAMESTEP_WINDOW_PIECE).

    Every rank listens at a port of its own, where nothing is ever said: a rank that has waited for a second connects to
    the others' ports, which their kernels refuse once the processes have ended. Where hosts cannot reach each other
    over TCP, as behind a firewall, nobody is watched, and a dead rank is found by the deadline; a rank that has
    reached nobody says so in the log.

    Args:
      comm: of MPI.
      hosts: of each rank, as `host_identity` says; more than one.
      timeout: seconds for all to come.

    Returns:
      Whether ranks are watched; the same on all.
    """
    listener = _listener(_name_of_another(hosts, comm.rank))
    mine = listener.getsockname()[:2] if listener is not None else None
    table = exchange_objects(comm, (mine, mpi_world.has_fabric()), timeout)
    if not any(fabric for _, fabric in table):
        comm.prefer_pieces(_EAGER_PIECE)
    places: list[tuple[str, int] | None] = [place for place, _ in table]
    found = [place for place in places if place is not None]
    other = _next_host(hosts, comm.rank)
    reached = len(found) == comm.size and _reaches(found[other])
    if not reached:
        _tell_unreached(comm.rank, other, hosts, places[other])
    everywhere = all(exchange_objects(comm, reached, timeout))
    if everywhere and listener is not None:
        names = [host.partition("/")[0] for host in hosts]
        texts = [f"{name} ({address_text(*place)})" for name, place in zip(names, found, strict=True)]
        _core.watch_ranks(
            comm, listener.detach(), [(*place, text) for place, text in zip(found, texts, strict=True)]
        )
    elif listener is not None:
        listener.close()
    return everywhere


def _name_of_another(hosts: Sequence[str], rank: int) -> str:
    return next(host for host in hosts if host != hosts[rank]).partition("/")[0]


def _next_host(hosts: Sequence[str], rank: int) -> int:
    """The first rank of the host after this one's: each host is asked by some rank of another.

    Example:
      >>> [_next_host(["a", "a", "b", "c"], rank) for rank in range(4)]
      [2, 2, 3, 0]
    """
    order = list(dict.fromkeys(hosts))
    after = order[(order.index(hosts[rank]) + 1) % len(order)]
    return hosts.index(after)


def _listener(toward: str) -> socket.socket | None:
    """Listens at the address that leads to another host; None where there is none."""
    try:
        address = interfaces.own_address(toward, os.environ, several_hosts=True)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG) if address else None
    except (Error, OSError):
        return None


def _reaches(place: tuple[str, int]) -> bool:
    """Whether a connection can be made; asked several times, for packets may be lost, and a busy host is slow."""
    deadline = time.monotonic() + _REACH_S
    while True:
        try:
            with socket.create_connection(place, timeout=_TRY_S):
                return True
        except ConnectionRefusedError:
            return False
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)  # where the kernel answers at once that there is no way


def _tell_unreached(rank: int, other: int, hosts: Sequence[str], place: tuple[str, int] | None) -> None:
    import logging  # costs as much to import as half the package

    where = f" at {address_text(*place)}" if place is not None else ""
    logging.getLogger("samestep").warning(
        "rank %d cannot reach rank %d (%s)%s over TCP: ranks of other hosts that die are found at the deadline",
        rank,
        other,
        hosts[other].partition("/")[0],
        where,
    )

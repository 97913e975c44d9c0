"""Detects ranks that have died under MPI, and limits the length of MPI messages between hosts."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from samestep import _core
from samestep._util.text import warn
from samestep.errors import Error
from samestep.group import json_exchange
from samestep.rendezvous import interfaces
from samestep.rendezvous.tcp_address import address_text
from samestep.world import bootstrap_mpi

_BACKLOG = 4096  # connections that are never accepted; more do no harm
_REACH_S = 5.0  # for another host to answer
_PAUSE_S = 0.1
_TRY_S = 0.7  # shorter than the kernel takes to ask once more
_EAGER_PIECE = 32 << 10


def begin(comm: _core.Communicator, hosts: Sequence[str], timeout: float) -> bool:
    """Lets `comm` and the groups made of it detect dead ranks, and sets how long messages are cut. Collective.

    Over TCP MPI asks before it sends what is longer than some 64 KiB (Open MPI 5), and the answer waits behind all
    that is on the line already. So there long reductions are cut into messages that go unasked: two hosts of one rank
    take 569 ms for 64 MiB at 1 Gbit/s, where messages of 256 KiB take 740 and the line alone 561
    (`benchmarks/hosts.py`, SAMESTEP_SEGMENT_BYTES).

    Every rank has two TCP ports of its own, at which other ranks that have waited for a second ask whether its process
    and its host are alive; see csrc/os/peer_watch.h. Where the hosts cannot reach each other over TCP, as behind a
    firewall, nobody is watched, and a dead rank is found at the deadline; a rank that has reached nobody logs it.

    Args:
      comm: of MPI.
      hosts: of each rank, as `host_identity` says.
      timeout: seconds for all to come.

    Returns:
      Whether ranks are watched; the same on all.
    """
    elsewhere = next((host for host in hosts if host != hosts[comm.rank]), "")
    ports = _Ports.open(elsewhere.partition("/")[0])
    mine = ports.endpoint if ports is not None else None
    layout = [([str, int, int], None), bool]
    table = json_exchange.allgather(comm, (mine, bootstrap_mpi.has_fabric()), layout, timeout)
    if elsewhere and not any(fabric for _, fabric in table):
        comm.configure(default_segment_bytes=_EAGER_PIECE)
    endpoints: list[_Endpoint | None] = [endpoint and _Endpoint(*endpoint) for endpoint, _ in table]
    found = [endpoint for endpoint in endpoints if endpoint is not None]
    other = _next_host(hosts, comm.rank)
    reached = len(found) == comm.size and _reaches(found[other])
    if not reached:
        _tell_unreached(comm.rank, other, hosts, endpoints[other])
    everywhere = all(json_exchange.allgather(comm, reached, bool, timeout))
    if everywhere and ports is not None:
        names = [host.partition("/")[0] for host in hosts]
        texts = [
            f"{name} ({address_text(endpoint.address, endpoint.port)})"
            for name, endpoint in zip(names, found, strict=True)
        ]
        watched = [(*endpoint, text) for endpoint, text in zip(found, texts, strict=True)]
        _core.watch_ranks(comm, ports.listener.detach(), ports.reserved.detach(), watched)
    elif ports is not None:
        ports.close()
    return everywhere


def _next_host(hosts: Sequence[str], rank: int) -> int:
    """The first rank of the host after this one's: each host is asked by some rank of another.

    Example:
      >>> [_next_host(["a", "a", "b", "c"], rank) for rank in range(4)]
      [2, 2, 3, 0]
    """
    order = list(dict.fromkeys(hosts))
    after = order[(order.index(hosts[rank]) + 1) % len(order)]
    return hosts.index(after)


class _Endpoint(NamedTuple):
    """Where a rank can be asked for."""

    address: str
    port: int  # at which it listens
    reserved: int  # at which it does not


class _Ports(NamedTuple):
    """The two ports of this rank."""

    listener: socket.socket
    reserved: socket.socket

    @classmethod
    def open(cls, toward: str) -> _Ports | None:
        """At the address that leads to another host, or with "" at one for this host; None if there is none."""
        with contextlib.ExitStack() as on_failure, contextlib.suppress(Error, OSError):
            address = interfaces.own_address(toward, os.environ, several_hosts=bool(toward))
            if not address:
                return None
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            made = [socket.socket(family), socket.socket(family)]
            for each in made:
                on_failure.enter_context(each)
                each.bind((address, 0))
            made[0].listen(_BACKLOG)
            on_failure.pop_all()
            return cls(*made)
        return None

    @property
    def endpoint(self) -> _Endpoint:
        address, port = self.listener.getsockname()[:2]
        return _Endpoint(address, port, self.reserved.getsockname()[1])

    def close(self) -> None:
        self.listener.close()
        self.reserved.close()


def _reaches(endpoint: _Endpoint) -> bool:
    """Whether the ports of a rank that is alive can be asked: its host answers, and does not refuse at the first one.

    No answer there means a full queue, as after more connections than `net.core.somaxconn`.
    """
    now = time.monotonic()
    return (
        _answers(endpoint.address, endpoint.reserved, now + _REACH_S) != ""
        and _answers(endpoint.address, endpoint.port, now) != "refuses"
    )


def _answers(address: str, port: int, deadline: float) -> str:
    """What a host answers: "accepts", "refuses", or nothing; asked several times, for packets may be lost."""
    while True:
        try:
            with socket.create_connection((address, port), timeout=_TRY_S):
                return "accepts"
        except ConnectionRefusedError:
            return "refuses"
        except OSError:
            if time.monotonic() > deadline:
                return ""
            time.sleep(_PAUSE_S)  # the kernel reports at once that there is no route


def _tell_unreached(rank: int, other: int, hosts: Sequence[str], endpoint: _Endpoint | None) -> None:
    where = f" at {address_text(endpoint.address, endpoint.port)}" if endpoint is not None else ""
    there = f"rank {other} ({hosts[other].partition('/')[0]}){where}"
    warn(f"rank {rank} cannot reach {there} over TCP: ranks that die are found at the deadline")

"""The connections between all pairs of ranks of a job, made once all of them have joined.

Each rank listens at a port of its own, connects to all ranks below it and is connected to by all above. The two ends
prove to each other that they know a secret: one that rank 0 makes for this world and tells through the store, together
with the job's own (`SAMESTEP_SECRET`), for strangers can read a store that has none. See `handshake`. Then the one that
connects says which rank it is, in a frame of which the handshake proves the origin.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from dataclasses import dataclass
from typing import NamedTuple

from samestep._util import descriptors, frames, handshake
from samestep._util.at_failure import at_failure
from samestep._util.strangers import Strangers
from samestep._util.text import ranks_text, warn
from samestep.errors import Error, TimeoutError, UnavailableError
from samestep.rendezvous.rendezvous import Rendezvous
from samestep.rendezvous.tcp_address import address_text

_BACKLOG = 4096
_HELLO, _RANK_NBYTES = b"H", 4
_INCOMING_NBYTES = handshake.CLIENT_NBYTES + frames.OVERHEAD_NBYTES + _RANK_NBYTES
_SECRET_NBYTES = 32
_TICK_S = 0.5
# Errors of a connection to a host of which no packet has come.
_SILENCE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)
_SAME_SECRET = "; is SAMESTEP_SECRET the same on all ranks?"


class Link(NamedTuple):
    """A connection to another rank; without a socket and keys for this one."""

    socket: socket.socket | None
    where: str
    """It leads to, such as `node1 (10.0.0.7:41021)`."""
    keys: tuple[bytes, bytes]
    """Of what this rank sends and of what it receives, fresh for this connection, 32 bytes each."""


def connect_all(
    rendezvous: Rendezvous, address: str, host_names: list[str], timeout: float, hindrance: str = ""
) -> list[Link]:
    """Connects all ranks with each other, and returns for each rank the connection with it. Collective.

    Args:
      address: of this host, by which the others reach this rank.
      host_names: of all ranks, for texts.
      hindrance: why this rank cannot use the connections, if it cannot.

    Raises:
      UnavailableError: a rank cannot be reached; on all ranks, naming it and its address. Or the first hindrance.
      TimeoutError: names the ranks to which there is no connection in time.
    """
    descriptors.allow_for_ranks(rendezvous.size)
    listener, problem = _listen(address, rendezvous.rank)
    problem = hindrance or problem
    with listener or contextlib.nullcontext():
        secret = os.urandom(_SECRET_NBYTES) if rendezvous.rank == 0 else b""
        port = listener.getsockname()[1] if listener else 0
        table = rendezvous.allgather_json([address, port, secret.hex(), problem], [str, int, str, str])
        for *_, theirs in table:
            if problem or theirs:
                raise UnavailableError(problem or theirs)
        assert listener is not None
        secret = table[0][2].encode() + handshake.job_secret()
        places = [(host, port) for host, port, *_ in table]
        where = [f"{name} ({address_text(*place)})" for name, place in zip(host_names, places, strict=True)]
        links = _MeshBuilder(rendezvous, listener, secret, where, timeout).build(places)
    alone: tuple[socket.socket | None, tuple[bytes, bytes]] = (None, (b"", b""))
    found = [links.get(rank, alone) for rank in range(rendezvous.size)]
    return [Link(link, place, keys) for (link, keys), place in zip(found, where, strict=True)]


def _listen(address: str, rank: int) -> tuple[socket.socket | None, str]:
    """A socket at a port of its own; or None, and what went wrong."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG), ""
    except OSError as error:
        return None, f"rank {rank} cannot listen at {address}: {descriptors.reason(error)}"


@dataclass
class _Outgoing:
    """The end that connects, to `rank`."""

    rank: int
    greeting: handshake.Client | None = None  # once it is connected


@dataclass
class _Incoming:
    """The accepting end; the peer is unknown until it has authenticated."""

    greeting: handshake.Greeting
    address: str
    n_read: int = 0


class _MeshBuilder:
    """All connections of this rank while they are made."""

    def __init__(
        self, rendezvous: Rendezvous, listener: socket.socket, secret: bytes, where: list[str], timeout: float
    ) -> None:
        self._rendezvous = rendezvous
        self._secret = secret
        self._where = where
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._links: dict[int, tuple[socket.socket, tuple[bytes, bytes]]] = {}
        self._ends: dict[socket.socket, _Outgoing | _Incoming] = {}
        self._strangers = Strangers(f"the port of rank {rendezvous.rank}", warn, rendezvous.size)
        self._listener = listener
        listener.setblocking(False)

    def build(self, places: list[tuple[str, int]]) -> dict[int, tuple[socket.socket, tuple[bytes, bytes]]]:
        """Connect with the ranks at these places; returns the connections by rank, with their keys."""
        with contextlib.ExitStack() as always, at_failure(self._close_links):
            always.callback(self._close_ends)
            try:
                self._selector = always.enter_context(selectors.DefaultSelector())
                self._selector.register(self._listener, selectors.EVENT_READ)
                for rank in range(self._rendezvous.rank):
                    self._connect(rank, places[rank])
                self._wait()
            except UnavailableError as error:
                raise self._reported(str(error)) from error
            except Error:
                raise
            except OSError as error:
                why = (
                    f"rank {self._rendezvous.rank} cannot connect to the others: {descriptors.reason(error)}"
                )
                raise self._reported(why) from error
        return self._links

    def _reported(self, text: str) -> UnavailableError:
        """The first cause on all ranks: before any connection is closed, for that is the next rank's error."""
        self._rendezvous.report_failure(text)
        return UnavailableError(self._rendezvous.failure() or text)

    def _connect(self, rank: int, place: tuple[str, int]) -> None:
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        link = socket.socket(family, socket.SOCK_STREAM)
        link.setblocking(False)
        self._ends[link] = _Outgoing(rank)
        self._selector.register(link, selectors.EVENT_WRITE)
        try:
            number = link.connect_ex(place)
        except (OSError, OverflowError, ValueError) as error:  # no address, or no port
            raise self._unreachable(rank, str(error)) from error
        if number not in (0, errno.EINPROGRESS):
            raise self._unreachable(rank, os.strerror(number))

    def _wait(self) -> None:
        """Complete all handshakes."""
        n_missing = self._rendezvous.size - 1
        asked_at = time.monotonic()
        while len(self._links) < n_missing:
            for key, _ in self._selector.select(_TICK_S):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._ends:
                    self._on_ready(key.fileobj, self._ends[key.fileobj])
            now = time.monotonic()
            for link in self._strangers.late():
                self._refuse(link, "it has not proved itself in time")
            if now - asked_at > _TICK_S:
                asked_at = now
                if failure := self._rendezvous.failure():
                    raise UnavailableError(failure)
                if now > self._deadline:
                    raise self._late()

    def _close_ends(self) -> None:
        for link in self._ends:
            link.close()

    def _close_links(self) -> None:
        for link, _ in self._links.values():
            link.close()

    def _note_silence(self) -> None:
        """Of the hosts that have not answered: those of slow or stopped ranks have, without their help."""
        ends = [end for end in self._ends.values() if isinstance(end, _Outgoing) and end.greeting is None]
        self._rendezvous.unanswered = [end.rank for end in ends]

    def _late(self) -> TimeoutError:
        self._note_silence()
        missing = [
            rank
            for rank in range(self._rendezvous.size)
            if rank != self._rendezvous.rank and rank not in self._links
        ]
        places = ", ".join(self._where[rank] for rank in missing[:4])
        return TimeoutError(
            f"rank {self._rendezvous.rank} at {self._where[self._rendezvous.rank]} has no connection with "
            f"{ranks_text(missing)} at {places} after {self._timeout:g} s: does a firewall stand between them?"
        )

    def _unreachable(self, rank: int, why: str) -> UnavailableError:
        return UnavailableError(
            f"rank {self._rendezvous.rank} cannot connect to rank {rank} at {self._where[rank]}: {why}; "
            "SAMESTEP_SOCKET_IFNAME names the network interface to use"
        )

    # --- both ends

    def _on_ready(self, link: socket.socket, end: _Outgoing | _Incoming) -> None:
        try:
            if isinstance(end, _Outgoing):
                self._on_outgoing(link, end)
            else:
                self._on_incoming(link, end)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and descriptors.are_used_up(error):
                raise  # no fault of the other end
            if isinstance(end, _Outgoing):
                if isinstance(error, OSError) and error.errno in _SILENCE:
                    self._note_silence()
                self._drop(link)
                raise self._unreachable(end.rank, str(error)) from error
            self._refuse(link, str(error))

    def _on_outgoing(self, link: socket.socket, outgoing: _Outgoing) -> None:
        if outgoing.greeting is None:
            if number := link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(number, os.strerror(number))
            where = handshake.place(link.getpeername(), link.getsockname())
            outgoing.greeting = handshake.Client(handshake.LINK, self._secret, where)
            link.sendall(outgoing.greeting.hello)
            self._selector.modify(link, selectors.EVENT_READ)
            return
        data = link.recv(outgoing.greeting.n_missing)
        if not data:
            raise ConnectionResetError(f"it has closed the connection{_SAME_SECRET}")
        try:
            proof = outgoing.greeting.feed(data)
        except PermissionError as error:
            raise ValueError(f"{error}{_SAME_SECRET}") from None
        if proof is not None:
            rank = self._rendezvous.rank.to_bytes(_RANK_NBYTES, "big")
            link.sendall(proof + outgoing.greeting.channel(most=0).seal(_HELLO, rank))
            self._keep(link, outgoing.rank)

    def _accept(self) -> None:
        try:
            link, address = self._listener.accept()
        except OSError as error:  # else it has gone again
            if descriptors.are_used_up(error):
                # Strangers must not take a rank's place; where all guests may be ranks there is none to take.
                incoming = self._strangers.all()
                if len(incoming) < self._rendezvous.size - len(self._links):
                    raise
                self._drop(incoming[0])
            return
        if (oldest := self._strangers.add(link)) is not None:
            self._drop(oldest)
        link.setblocking(False)
        where = handshake.place(link.getsockname(), address)
        greeting = handshake.Greeting(handshake.LINK, self._secret, where)
        self._ends[link] = _Incoming(greeting, address_text(*address[:2]))
        self._selector.register(link, selectors.EVENT_READ)

    def _on_incoming(self, link: socket.socket, incoming: _Incoming) -> None:
        data = link.recv(_INCOMING_NBYTES - incoming.n_read)  # not more: what comes behind it is for the core
        if not data:
            raise ConnectionResetError("it has closed the connection")
        incoming.n_read += len(data)
        link.sendall(incoming.greeting.feed(data))
        if incoming.n_read < _INCOMING_NBYTES:
            return
        channel = incoming.greeting.channel(most=_RANK_NBYTES)
        ((_, said),) = channel.feed(incoming.greeting.remainder)
        rank = int.from_bytes(said, "big")
        if not self._rendezvous.rank < rank < self._rendezvous.size or rank in self._links:
            raise ValueError(f"says it is rank {rank}")
        self._keep(link, rank)

    def _refuse(self, link: socket.socket, why: str) -> None:
        end = self._ends[link]
        assert isinstance(end, _Incoming)
        self._strangers.report(end.address, why)
        self._drop(link)

    def _drop(self, link: socket.socket) -> None:
        del self._ends[link]
        self._strangers.remove(link)
        self._selector.unregister(link)
        link.close()

    def _keep(self, link: socket.socket, rank: int) -> None:
        greeting = self._ends.pop(link).greeting
        assert greeting is not None
        self._strangers.remove(link)
        self._selector.unregister(link)
        self._links[rank] = link, greeting.keys

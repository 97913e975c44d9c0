"""A connection between each two ranks of a job, made once all have met.

Each rank listens at a port of its own, connects to all ranks below it and is connected to by all above. The two ends
prove to each other that they know the job's secret, which rank 0 makes and tells through the store; see `handshake`.
Then the one that connects says which rank it is.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import struct
import time

from samestep.errors import TimeoutError, UnavailableError
from samestep.launch.ending import ranks_text
from samestep.rendezvous import handshake
from samestep.rendezvous.meeting import Meeting
from samestep.rendezvous.tcp_address import address_text

__all__ = ["connect_all"]

_BACKLOG = 4096
_RANK = struct.Struct("!I")
_GUEST_NBYTES = handshake.CLIENT_NBYTES + _RANK.size
_GUEST_S = 10.0  # for a connection to prove that it is a rank's
_MOST_GUESTS = 512
_TICK_S = 0.5


def connect_all(
    meeting: Meeting, address: str, host_names: list[str], timeout: float
) -> list[tuple[socket.socket | None, str]]:
    """Connects all ranks with each other. Collective.

    Args:
      meeting: of all ranks.
      address: of this host, by which the others reach this rank.
      host_names: of all ranks, for texts.
      timeout: seconds.

    Returns:
      For each rank a socket, None for this one, and where it leads: `node1 (10.0.0.7:41021)`.

    Raises:
      UnavailableError: a rank cannot be reached; on all ranks, naming it and its address.
      TimeoutError: names the ranks to which there is no connection in time.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=_BACKLOG) as listener:
        secret = os.urandom(32) if meeting.rank == 0 else b""
        mine = json.dumps([address, listener.getsockname()[1], secret.hex()])
        table = [json.loads(entry) for entry in meeting.exchange(mine.encode())]
        secret = bytes.fromhex(table[0][2])
        places = [(host, port) for host, port, _ in table]
        where = [f"{name} ({address_text(*place)})" for name, place in zip(host_names, places, strict=True)]
        gathering = _Gathering(meeting, listener, secret, where, timeout)
        try:
            for rank in range(meeting.rank):
                gathering.connect(rank, places[rank])
            links = gathering.wait()
        except UnavailableError as error:
            meeting.complain(str(error))
            gathering.close_links()
            raise
        except BaseException:
            gathering.close_links()
            raise
        finally:
            gathering.close()
    return [(links.get(rank), where[rank]) for rank in range(meeting.size)]


class _Host:
    """The end that connects, to `rank`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connected = False
        self.nonce = b""
        self.answer = b""


class _Guest:
    """The end that is connected to: by nobody knows whom."""

    def __init__(self, secret: bytes, address: str) -> None:
        self.greeting = handshake.Greeting(secret)
        self.n_read = 0
        self.address = address
        self.deadline = time.monotonic() + _GUEST_S


class _Gathering:
    """All connections of this rank while they are made."""

    def __init__(
        self, meeting: Meeting, listener: socket.socket, secret: bytes, where: list[str], timeout: float
    ) -> None:
        self._meeting = meeting
        self._secret = secret
        self._where = where
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._links: dict[int, socket.socket] = {}
        self._ends: dict[socket.socket, _Host | _Guest] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def connect(self, rank: int, place: tuple[str, int]) -> None:
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        link = socket.socket(family, socket.SOCK_STREAM)
        link.setblocking(False)
        self._ends[link] = _Host(rank)
        self._selector.register(link, selectors.EVENT_WRITE)
        number = link.connect_ex(place)
        if number not in (0, errno.EINPROGRESS):
            raise self._unreachable(rank, os.strerror(number))

    def wait(self) -> dict[int, socket.socket]:
        """The connections by rank. Takes what is said on the way."""
        n_missing = self._meeting.size - 1
        asked_at = time.monotonic()
        while len(self._links) < n_missing:
            for key, _ in self._selector.select(_TICK_S):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._ends:
                    self._on_ready(key.fileobj, self._ends[key.fileobj])
            now = time.monotonic()
            self._drop_late(now)
            if now - asked_at > _TICK_S:
                asked_at = now
                if complaint := self._meeting.complaint():
                    raise UnavailableError(complaint)
                if now > self._deadline:
                    raise self._late()
        return self._links

    def close(self) -> None:
        """Closes what has not become a connection between ranks."""
        for link in self._ends:
            link.close()
        self._selector.close()

    def close_links(self) -> None:
        """Closes the connections between ranks too."""
        for link in self._links.values():
            link.close()

    def _late(self) -> TimeoutError:
        missing = [
            rank
            for rank in range(self._meeting.size)
            if rank != self._meeting.rank and rank not in self._links
        ]
        places = ", ".join(self._where[rank] for rank in missing[:4])
        return TimeoutError(
            f"rank {self._meeting.rank} at {self._where[self._meeting.rank]} has no connection with "
            f"{ranks_text(missing)} at {places} after {self._timeout:g} s: does a firewall stand between them?"
        )

    def _unreachable(self, rank: int, why: str) -> UnavailableError:
        return UnavailableError(
            f"rank {self._meeting.rank} cannot connect to rank {rank} at {self._where[rank]}: {why}; "
            "SAMESTEP_SOCKET_IFNAME names the network interface to use"
        )

    # --- both ends

    def _on_ready(self, link: socket.socket, end: _Host | _Guest) -> None:
        try:
            if isinstance(end, _Host):
                self._on_host(link, end)
            else:
                self._on_guest(link, end)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self._drop(link)
            if isinstance(end, _Host):
                raise self._unreachable(end.rank, str(error)) from error
            import logging  # costs as much to import as half the package

            logging.getLogger("samestep").warning(
                "a stranger at the port of rank %d, from %s, was dropped: %s",
                self._meeting.rank,
                end.address,
                error,
            )

    def _on_host(self, link: socket.socket, host: _Host) -> None:
        if not host.connected:
            if number := link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(number, os.strerror(number))
            host.connected = True
            hello, host.nonce = handshake.hello()
            link.sendall(hello)
            self._selector.modify(link, selectors.EVENT_READ)
            return
        data = link.recv(handshake.ANSWER_NBYTES - len(host.answer))
        if not data:
            raise ConnectionResetError("it has closed the connection")
        host.answer += data
        if len(host.answer) < handshake.ANSWER_NBYTES:
            return
        proof = handshake.check_answer(host.answer, host.nonce, self._secret)
        if proof is None:
            raise ValueError("another program answers there")
        link.sendall(proof + _RANK.pack(self._meeting.rank))
        self._keep(link, host.rank)

    def _accept(self) -> None:
        try:
            link, address = self._listener.accept()
        except OSError:  # it has gone again, or no descriptor is free
            return
        guests = [other for other, end in self._ends.items() if isinstance(end, _Guest)]
        if len(guests) >= _MOST_GUESTS:
            self._drop(guests[0])  # the oldest: a rank proves itself at once, so it is none
        link.setblocking(False)
        self._ends[link] = _Guest(self._secret, address_text(*address[:2]))
        self._selector.register(link, selectors.EVENT_READ)

    def _on_guest(self, link: socket.socket, guest: _Guest) -> None:
        data = link.recv(_GUEST_NBYTES - guest.n_read)  # not more: what comes behind it is for the core
        if not data:
            raise ConnectionResetError("it has closed the connection")
        guest.n_read += len(data)
        link.sendall(guest.greeting.feed(data))
        if guest.n_read < _GUEST_NBYTES:
            return
        (rank,) = _RANK.unpack(guest.greeting.rest)
        if not self._meeting.rank < rank < self._meeting.size or rank in self._links:
            raise ValueError(f"says it is rank {rank}")
        self._keep(link, rank)

    def _drop_late(self, now: float) -> None:
        for link, end in list(self._ends.items()):
            if isinstance(end, _Guest) and end.deadline < now:
                self._drop(link)

    def _drop(self, link: socket.socket) -> None:
        del self._ends[link]
        self._selector.unregister(link)
        link.close()

    def _keep(self, link: socket.socket, rank: int) -> None:
        del self._ends[link]
        self._selector.unregister(link)
        self._links[rank] = link

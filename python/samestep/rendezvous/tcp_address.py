"""Hosts and ports as users write them, the socket on which rank 0 listens, and what a store says there."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from samestep._util import handshake
from samestep._util.frames import Channel
from samestep.errors import InvalidArgumentError, UnavailableError

_BACKLOG = 1024


def address_text(host: str, port: int) -> str:
    """Example: address_text("::1", 80) is "[::1]:80", and an empty host reads "*"."""
    return f"[{host}]:{port}" if ":" in host else f"{host or '*'}:{port}"


def check_address(host: str, port: int) -> None:
    """Raises InvalidArgumentError where no store can ever be: a multicast address, a port outside 0 to 65535."""
    if not 0 <= port <= 65535:
        raise InvalidArgumentError(f"port {port} is outside 0 to 65535")
    address = _literal(host)
    if address is not None and address.is_multicast:
        raise InvalidArgumentError(f"{host} is a multicast address; give the address of rank 0's host")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for a store.

    An address is taken as it is, and "localhost" too; a name stands for all interfaces, because the name of a host
    often means an internal address on the host itself. So does an empty `host`.

    Raises:
      InvalidArgumentError: as `check_address`.
      UnavailableError: the port is taken, or not to be had here; says host, port and the cure.
    """
    check_address(host, port)
    address = _literal("127.0.0.1" if host == "localhost" else host)
    try:
        place = ("" if address is None else str(address), port)  # "": all interfaces
        both = address is None and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in place[0] else socket.AF_INET
        return socket.create_server(place, family=family, dualstack_ipv6=both, backlog=_BACKLOG)
    except OSError as error:
        raise UnavailableError(f"cannot listen at {address_text(host, port)}: {_cure(error)}") from error


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _cure(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is taken by another program or job; choose another one (MASTER_PORT, or in the URL)"
    if error.errno == errno.EADDRNOTAVAIL:
        return "that is not an address of this host; MASTER_ADDR, or the URL, must name the host of rank 0"
    return f"{os.strerror(error.errno or 0)}; choose another address or port (MASTER_ADDR, MASTER_PORT, or the URL)"


REQUEST = b"Q"  # JSON: an operation of Table and its arguments, or "await", paths, seconds
LEAVE = b"L"  # the last word of a process, without an answer
RESULT, REFUSAL = b"R", b"E"
LARGEST_FRAME = 1 << 28
OPEN, CLOSED = handshake.STORE + b"o", handshake.STORE + b"c"
"""What a process of this user hears first at the Unix socket: whether others are let in at the port."""

_LARGEST_OF_UNPROVED = 1 << 20  # bytes of a frame
_PATH_NBYTES = 256  # that a path which is waited for costs


class Connection:
    """One connection: a stranger until it has proved itself, then a client with at most one request at a time."""

    def __init__(self, link: socket.socket, address: str, secret: bytes | None, *, is_proof: bool) -> None:
        self.link, self.address = link, address
        self.heard_at = 0.0  # when its last words came
        self.greeting = None if secret is None else handshake.Greeting(handshake.STORE, secret)
        self.is_client = secret is None
        self.is_proved = is_proof  # once it is a client
        self.deadline: float | None = None  # of what it waits for
        self.most = LARGEST_FRAME if is_proof else _LARGEST_OF_UNPROVED
        self.channel = Channel(most=self.most)
        self.unsent = bytearray()
        self.missing: set[tuple[str, ...]] = set()
        self.n_held = 0  # bytes, as last counted

    @property
    def host(self) -> str:
        """From which it comes."""
        return self.address.rpartition(":")[0]

    @property
    def n_pending(self) -> int:
        """Bytes that it makes this process hold."""
        return self.channel.n_waiting + len(self.unsent) + _PATH_NBYTES * len(self.missing)

    def has_spoken(self) -> bool:
        """Whether there is something to read."""
        try:
            return bool(self.link.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

"""What a store and its clients say to each other over TCP, and one connection at the store's end."""

from __future__ import annotations

import socket

from samestep._util import handshake
from samestep._util.frames import Channel

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

"""How two processes prove to each other that they know the same secret, before they exchange anything else.

    client                                server
    protocol, client's nonce       ->
                                   <-     protocol, server's nonce, proof of "server"
    proof of "client"              ->
    frames of a `Channel`         <->

Both ends derive from the secret, both nonces, the protocol's name and the server's address, as each of them sees it, by
HKDF-SHA256: the proofs, and the keys of all that follows. So the secret is never sent, and a process that forwards the
bytes of others can neither read them, nor use a proof elsewhere, nor add a frame. Uses the standard library only, for
the agents of `samestep run`.
"""

from __future__ import annotations

import os
import socket
from typing import Any, ClassVar

from samestep import _settings
from samestep._util.frames import Channel
from samestep._util.network_identity import network_identity

STORE, LINK, AGENT = b"samestep store 3", b"samestep link  3", b"samestep agent 3"
"""The protocols, whose names have one length."""

_NAME_NBYTES = 16
_NONCE_NBYTES = 16
_PROOF_NBYTES = 32
_HELLO_NBYTES = _NAME_NBYTES + _NONCE_NBYTES
ANSWER_NBYTES = _HELLO_NBYTES + _PROOF_NBYTES
CLIENT_NBYTES = _HELLO_NBYTES + _PROOF_NBYTES  # that a client sends in all


def job_secret() -> bytes:
    """What only the processes of this job know; empty where nobody has set it."""
    return (_settings.get(_settings.SECRET) or "").encode(errors="surrogateescape")


def place(server: Any, client: Any) -> bytes:
    """Where a connection leads, as one of its ends sees it; the two differ where somebody forwards it.

    An address of both ends is one of their own network. Several hosts have it, if it is 127.0.0.1 or that of a bridge
    for containers, so the network belongs to it.

    Args:
      server, client: their addresses, as `socket.getsockname` and `getpeername` tell them.

    Example:
      >>> place(("10.0.0.7", 29500), ("10.0.0.8", 41021))
      b'10.0.0.7 29500 '
    """
    host = server[0].partition("%")[0]
    network = network_identity() if host == client[0].partition("%")[0] else ""
    return f"{host} {server[1]} {network}".encode()


def _equal(one: bytes, other: bytes) -> bool:
    import hmac

    return hmac.compare_digest(one, other)  # in constant time


class _End:
    """What both sides derive once they know both nonces.

    Args:
      protocol: of which this is a connection.
      secret: that both ends know.
      where: `place` of the server; empty where the network may translate addresses.
    """

    _sides: ClassVar[tuple[bytes, bytes]]  # this one and the other

    def __init__(self, protocol: bytes, secret: bytes, where: bytes = b"") -> None:
        self._protocol, self._secret, self._where = protocol, secret, where
        self._nonce = os.urandom(_NONCE_NBYTES)
        self._key = self._arrived = b""

    def _take(self, data: bytes, wrong_protocol: str) -> None:
        self._arrived += data
        if self._arrived[:_NAME_NBYTES] != self._protocol[: len(self._arrived)]:
            raise ValueError(wrong_protocol)

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """The keys of what this end sends and of what it receives, 32 bytes each, for what is not a `channel`."""
        sent, received = (self._derive(b"stream of " + side, 1) for side in self._sides)
        return sent, received

    def channel(self, *, most: int, readable: frozenset[bytes] = frozenset()) -> Channel:
        """What both ends say after the handshake, proved if there is a secret. The arguments are those of `Channel`."""
        if not self._secret:
            return Channel(most=most)
        sent, received = (self._derive(b"frames of " + side, 2) for side in self._sides)
        return Channel(most=most, keys=(sent, received), readable=readable)

    def _agree(self, nonces: bytes) -> None:
        import hmac

        self._key = hmac.digest(nonces, self._secret, "sha256")

    def _derive(self, purpose: bytes, n_blocks: int) -> bytes:
        """Blocks of 32 bytes for one purpose, as HKDF (RFC 5869) expands a key."""
        import hmac

        assert self._key, "the handshake is not over"
        blocks = [b""]
        for number in range(1, n_blocks + 1):
            told = b"|".join([self._protocol, self._where, purpose]) + bytes([number])
            blocks.append(hmac.digest(self._key, blocks[-1] + told, "sha256"))
        return b"".join(blocks)

    def _proof(self, side: bytes) -> bytes:
        return self._derive(b"proof of " + side, 1)


class Client(_End):
    """The client's side, one piece of bytes after the other."""

    _sides = (b"client", b"server")

    @property
    def hello(self) -> bytes:
        """What to send first."""
        return self._protocol + self._nonce

    @property
    def n_missing(self) -> int:
        """Bytes of the server's answer that have not come; read no more than these."""
        return ANSWER_NBYTES - len(self._arrived)

    def feed(self, data: bytes) -> bytes | None:
        """Takes what the server sent, and returns the client's proof once the server has given its own.

        Raises:
          ValueError: another program, or another version, answers.
          PermissionError: the server does not know the secret, or means another address.
        """
        self._take(data, "another program answers there")
        if self.n_missing > 0:
            return None
        self._agree(self._nonce + self._arrived[_NAME_NBYTES:_HELLO_NBYTES])
        if not _equal(self._arrived[_HELLO_NBYTES:ANSWER_NBYTES], self._proof(b"server")):
            forwards = ", or forwards connections to another address" if self._where else ""
            raise PermissionError(f"who answers there does not know this job's secret{forwards}")
        return self._proof(b"client")


def greet(link: socket.socket, client: Client) -> None:
    """The client's side at a socket that blocks.

    Raises:
      ValueError, PermissionError: as `Client.feed`. OSError: the server closes the connection.
    """
    link.sendall(client.hello)
    proof = None
    while proof is None:
        data = link.recv(client.n_missing)
        if not data:
            raise ConnectionResetError("the connection was closed at once")
        proof = client.feed(data)
    link.sendall(proof)


class Greeting(_End):
    """The server's side, one piece of bytes after the other.

    Attributes:
      answered: the client has said hello, and been sent our proof.
      done: the client has proved itself.
      remainder: what it sent after that.
    """

    _sides = (b"server", b"client")

    answered = done = False
    remainder = b""

    def feed(self, data: bytes) -> bytes:
        """Takes what the client sent, and returns what to answer.

        Raises:
          ValueError: it is a stranger.
        """
        self._take(data, "it does not speak this protocol")
        answer = b""
        if not self.answered and len(self._arrived) >= _HELLO_NBYTES:
            self.answered = True
            self._agree(self._arrived[_NAME_NBYTES:_HELLO_NBYTES] + self._nonce)
            answer = self._protocol + self._nonce + self._proof(b"server")
        if len(self._arrived) >= CLIENT_NBYTES:
            if not _equal(self._arrived[_HELLO_NBYTES:CLIENT_NBYTES], self._proof(b"client")):
                raise ValueError("it does not know the secret")
            self.done, self.remainder = True, self._arrived[CLIENT_NBYTES:]
        return answer

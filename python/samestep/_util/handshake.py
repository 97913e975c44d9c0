"""How two processes prove to each other that they know the same secret, before they exchange anything else.

    client                                server
    protocol, client's nonce       ->
                                   <-     protocol, server's nonce, proof of "server"
    proof of "client"              ->

A proof is the HMAC-SHA256 of the protocol's name and both nonces under the secret, so that the secret itself is never
sent and no proof is good for another connection or another protocol. It proves who is at the other end; what is said
afterwards is neither encrypted nor signed. Uses the standard library only, for the agents of `samestep run`.
"""

from __future__ import annotations

import os

from samestep import _settings

__all__ = ["AGENT", "ANSWER_NBYTES", "CLIENT_NBYTES", "LINK", "STORE", "Client", "Greeting", "job_secret"]

STORE, LINK, AGENT = b"samestep store 2", b"samestep link  2", b"samestep agent 2"
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


def _proof(who: bytes, secret: bytes, protocol: bytes, nonces: bytes) -> bytes:
    import hashlib
    import hmac

    return hmac.digest(secret, who + protocol + nonces, hashlib.sha256)


def _equal(one: bytes, other: bytes) -> bool:
    import hmac

    return hmac.compare_digest(one, other)  # in constant time


class Client:
    """The client's side, one piece of bytes after the other.

    Attributes:
      hello: what to send first.
    """

    def __init__(self, protocol: bytes, secret: bytes) -> None:
        self._protocol, self._secret = protocol, secret
        self._nonce = os.urandom(_NONCE_NBYTES)
        self._arrived = b""
        self.hello = protocol + self._nonce

    @property
    def n_missing(self) -> int:
        """Bytes of the server's answer that have not come; read no more than these."""
        return ANSWER_NBYTES - len(self._arrived)

    def feed(self, data: bytes) -> bytes | None:
        """Takes what the server sent, and returns the client's proof once the server has given its own.

        Raises:
          ValueError: another program, or another version, answers.
          PermissionError: the server does not know the secret.
        """
        self._arrived += data
        if self._arrived[:_NAME_NBYTES] != self._protocol[: len(self._arrived)]:
            raise ValueError("another program answers there")
        if self.n_missing > 0:
            return None
        nonces = self._nonce + self._arrived[_NAME_NBYTES:_HELLO_NBYTES]
        theirs = self._arrived[_HELLO_NBYTES:ANSWER_NBYTES]
        if not _equal(theirs, _proof(b"server", self._secret, self._protocol, nonces)):
            raise PermissionError("who answers there does not know this job's secret")
        return _proof(b"client", self._secret, self._protocol, nonces)


class Greeting:
    """The server's side, one piece of bytes after the other.

    Attributes:
      answered: the client has said hello, and been sent our proof.
      done: the client has proved itself.
      remainder: what it sent after that.
    """

    def __init__(self, protocol: bytes, secret: bytes) -> None:
        self._protocol, self._secret = protocol, secret
        self._arrived = bytearray()
        self._nonces = b""
        self.answered = self.done = False
        self.remainder = b""

    def feed(self, data: bytes) -> bytes:
        """Takes what the client sent, and returns what to answer.

        Raises:
          ValueError: it is a stranger.
        """
        self._arrived += data
        if self._arrived[:_NAME_NBYTES] != self._protocol[: len(self._arrived)]:
            raise ValueError("it does not speak this protocol")
        answer = b""
        if not self._nonces and len(self._arrived) >= _HELLO_NBYTES:
            nonce = os.urandom(_NONCE_NBYTES)
            self.answered = True
            self._nonces = bytes(self._arrived[_NAME_NBYTES:_HELLO_NBYTES]) + nonce
            answer = self._protocol + nonce + _proof(b"server", self._secret, self._protocol, self._nonces)
        if len(self._arrived) >= CLIENT_NBYTES:
            given = bytes(self._arrived[_HELLO_NBYTES:CLIENT_NBYTES])
            if not _equal(given, _proof(b"client", self._secret, self._protocol, self._nonces)):
                raise ValueError("it does not know the secret")
            self.done, self.remainder = True, bytes(self._arrived[CLIENT_NBYTES:])
        return answer

"""How a store and its clients recognise each other before anything else is said.

    client                                server
    MAGIC, client's nonce          ->
                                   <-     MAGIC, server's nonce, proof of "server"
    proof of "client"              ->

A proof is the HMAC of both nonces under the job's secret (`SAMESTEP_SECRET`, which may be empty): neither a stranger
nor another job's rank gets in, and a client does not believe a stranger's store.
"""

from __future__ import annotations

import hashlib
import hmac
import os

__all__ = ["ANSWER_NBYTES", "CLIENT_NBYTES", "MAGIC", "Greeting", "check_answer", "hello", "job_secret"]

MAGIC = b"samestep store 1"
_NONCE_NBYTES = 16
_PROOF_NBYTES = 32
_HELLO_NBYTES = len(MAGIC) + _NONCE_NBYTES
ANSWER_NBYTES = _HELLO_NBYTES + _PROOF_NBYTES
CLIENT_NBYTES = _HELLO_NBYTES + _PROOF_NBYTES  # that a client sends in all


def job_secret() -> bytes:
    """What only the processes of this job know; empty where nobody has set it."""
    return os.environ.get("SAMESTEP_SECRET", "").encode()


def hello() -> tuple[bytes, bytes]:
    """What a client says first, and its nonce."""
    nonce = os.urandom(_NONCE_NBYTES)
    return MAGIC + nonce, nonce


def check_answer(answer: bytes, client_nonce: bytes, secret: bytes) -> bytes | None:
    """The client's proof for a server that has given its own; None if that one does not know the secret."""
    nonces = client_nonce + answer[len(MAGIC) : _HELLO_NBYTES]
    if not hmac.compare_digest(answer[_HELLO_NBYTES:], _proof("server", secret, nonces)):
        return None
    return _proof("client", secret, nonces)


def _proof(who: str, secret: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, who.encode() + nonces, hashlib.sha256)


class Greeting:
    """The server's side, one piece of bytes after the other.

    Attributes:
      done: the client has proved itself.
      rest: what it sent after that.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._arrived = bytearray()
        self._nonces = b""
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Takes what the client sent, and returns what to answer.

        Raises:
          ValueError: it is a stranger.
        """
        self._arrived += data
        if self._arrived[: len(MAGIC)] != MAGIC[: len(self._arrived)]:
            raise ValueError("not a client of a store")
        answer = b""
        if not self._nonces and len(self._arrived) >= _HELLO_NBYTES:
            nonce = os.urandom(_NONCE_NBYTES)
            self._nonces = bytes(self._arrived[len(MAGIC) : _HELLO_NBYTES]) + nonce
            answer = MAGIC + nonce + _proof("server", self._secret, self._nonces)
        end = _HELLO_NBYTES + _PROOF_NBYTES
        if len(self._arrived) >= end:
            given = bytes(self._arrived[_HELLO_NBYTES:end])
            if not hmac.compare_digest(given, _proof("client", self._secret, self._nonces)):
                raise ValueError("does not know the secret")
            self.done, self.rest = True, bytes(self._arrived[end:])
        return answer

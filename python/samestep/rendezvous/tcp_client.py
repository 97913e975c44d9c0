"""Connections to the process that keeps a store."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any

from samestep.errors import (
    InvalidArgumentError,
    NotInitializedError,
    PeerLostError,
    TimeoutError,
    UnavailableError,
)
from samestep.launch import frames
from samestep.rendezvous import handshake
from samestep.rendezvous.tcp_address import address_text
from samestep.rendezvous.tcp_server import LARGEST_FRAME, REFUSAL, REQUEST

__all__ = ["Client"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5  # between attempts to connect
_GRACE_S = 5.0  # for an answer, on top of the time that was asked for


class Client:
    """Asks the server at an address. Threads do not wait for each other: each request has a connection of its own.

    Args:
      host, port: where the server is.
      secret: of the job.
      timeout: seconds to reach it at first; until then a refused connection is tried again.

    Raises:
      TimeoutError: nobody answers there.
      UnavailableError: something else does, or the store of another job.
    """

    def __init__(self, host: str, port: int, secret: bytes, timeout: float) -> None:
        self._host, self._port, self._secret = host, port, secret
        self._where = address_text(host, port)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._idle = [self._connect_patiently(timeout)]

    def request(self, *words: Any, seconds: float) -> Any:
        """What the server answers to an operation, which it may take `seconds` for.

        Raises:
          InvalidArgumentError: the server refuses it.
          PeerLostError: the server has ended. TimeoutError: it does not answer.
        """
        patience = seconds + _GRACE_S
        try:
            kind, payload = self._ask(self._take(patience), frames.encode(REQUEST, list(words)), patience)
        except TimeoutError:
            raise
        except OSError as error:
            if isinstance(error, socket.timeout):
                raise TimeoutError(
                    f"the store at {self._where} has not answered within {patience:g} s"
                ) from error
            raise PeerLostError(
                f"rank 0, which keeps the store at {self._where}, has ended: {error}"
            ) from error
        answer = json.loads(payload)
        if kind == REFUSAL:
            raise InvalidArgumentError(answer)
        return answer[0]

    def _ask(self, link: socket.socket, request: bytes, patience: float) -> tuple[bytes, bytes]:
        try:
            link.settimeout(patience)
            link.sendall(request)
            decoder = frames.Decoder(most=LARGEST_FRAME)
            arrived: list[tuple[bytes, bytes]] = []
            while not arrived:
                data = link.recv(1 << 16)
                if not data:
                    raise ConnectionResetError("it has closed the connection")
                arrived = list(decoder.feed(data))
        except BaseException:
            link.close()
            raise
        self._give_back(link)
        return arrived[0]

    def close(self) -> None:
        """Leaves. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            if self._pid == os.getpid():  # in a fork the connection is still the parent's
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _take(self, patience: float) -> socket.socket:
        with self._lock:
            if self._pid != os.getpid():
                for link in self._idle:
                    link.close()
                self._pid, self._idle = os.getpid(), []
            if self._closed:
                raise NotInitializedError(f"the store at {self._where} has been closed")
            if self._idle:
                return self._idle.pop()
        return self._connect(patience)

    def _give_back(self, link: socket.socket) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(link)
                return
        link.close()

    def _connect_patiently(self, timeout: float) -> socket.socket:
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return self._connect(max(0.001, deadline - time.monotonic()))
            except OSError as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"nobody answers at {self._where} within {timeout:g} s: {error}"
                    ) from error
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _connect(self, timeout: float) -> socket.socket:
        link = socket.create_connection((self._host, self._port), timeout=timeout)
        try:
            if link.getsockname() == link.getpeername():  # where nobody listens this can happen by chance
                raise ConnectionRefusedError("nobody listens")
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._greet(link)
        except BaseException:
            link.close()
            raise
        return link

    def _greet(self, link: socket.socket) -> None:
        hello, nonce = handshake.hello()
        link.sendall(hello)
        answer = b""
        while len(answer) < handshake.ANSWER_NBYTES:
            data = link.recv(handshake.ANSWER_NBYTES - len(answer))
            if not data:
                raise ConnectionResetError("the connection was closed at once")
            answer += data
            if answer[: len(handshake.MAGIC)] != handshake.MAGIC[: len(answer)]:
                raise UnavailableError(
                    f"another program answers at {self._where}; choose another port (MASTER_PORT, or in the URL)"
                )
        proof = handshake.check_answer(answer, nonce, self._secret)
        if proof is None:
            raise UnavailableError(
                f"the store at {self._where} is another job's: SAMESTEP_SECRET differs; choose another port "
                "(MASTER_PORT, or in the URL), or give all ranks of the job the same secret"
            )
        link.sendall(proof)

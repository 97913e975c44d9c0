"""The thread in rank 0 that keeps the contents of a `TCPStore`."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from samestep.errors import InvalidArgumentError
from samestep.launch import frames
from samestep.rendezvous import handshake
from samestep.rendezvous.table import WRITES, Table

__all__ = ["LARGEST_FRAME", "REQUEST", "Server"]

REQUEST = b"Q"  # JSON: an operation of Table and its arguments, or "await", paths, seconds
RESULT, REFUSAL = b"R", b"E"
LARGEST_FRAME = 1 << 28
_STRANGER_S = 10.0  # for a connection to prove that it is one of ours
_MOST_STRANGERS = 512
_TICK_S = 1.0


class _Connection:
    """One connection: a stranger until it has proved itself, then a client with at most one request at a time."""

    def __init__(self, link: socket.socket, deadline: float, secret: bytes) -> None:
        self.link = link
        self.is_client = False
        self.deadline: float | None = deadline  # of the handshake, then of what it waits for
        self.greeting = handshake.Greeting(secret)
        self.decoder = frames.Decoder(most=LARGEST_FRAME)
        self.unsent = bytearray()
        self.missing: set[tuple[str, ...]] = set()


class Server:
    """Serves a table until `close`. Whoever does not know the secret is disconnected, whatever it sends.

    Args:
      listener: a listening socket, owned from now on.
      secret: of the job.
    """

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        self._table = Table()
        self._connections: set[_Connection] = set()
        self._waiting: dict[tuple[str, ...], set[_Connection]] = {}
        self._ends_at: float | None = None
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, lambda _: self._accept())
        self._selector.register(self._woken, selectors.EVENT_READ, lambda _: self._woken.recv(64))
        self._thread = threading.Thread(target=self._serve, name="samestep-store", daemon=True)
        self._thread.start()

    def close(self, linger: float) -> None:
        """Ends when the last client has left, or after `linger` seconds."""
        self._ends_at = time.monotonic() + linger
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._ends_at is None or (self._has_clients() and time.monotonic() < self._ends_at):
                for key, events in self._selector.select(self._patience()):
                    act: Callable[[int], object] = key.data
                    act(events)
                self._look_at_the_clock()
        finally:
            for connection in list(self._connections):
                self._drop(connection)
            self._selector.close()
            for link in (self._listener, self._wake, self._woken):
                link.close()

    def _has_clients(self) -> bool:
        return any(connection.is_client for connection in self._connections)

    def _patience(self) -> float:
        now = time.monotonic()
        times = [c.deadline for c in self._connections if c.deadline is not None]
        if self._ends_at is not None:
            times.append(self._ends_at)
        return max(0.0, min([_TICK_S, *(t - now for t in times)]))

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for connection in [c for c in self._connections if c.deadline is not None and c.deadline <= now]:
            if connection.is_client:
                self._stop_waiting(connection)
            else:
                self._drop(connection)

    # --- connections

    def _accept(self) -> None:
        strangers = [c for c in self._connections if not c.is_client]
        if len(strangers) >= _MOST_STRANGERS:
            self._drop(min(strangers, key=lambda c: c.deadline or 0.0))
        try:
            link, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is free: not to be asked again at once, for ever
            time.sleep(0.01)
            return
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = _Connection(link, time.monotonic() + _STRANGER_S, self._secret)
        self._connections.add(connection)
        self._selector.register(link, selectors.EVENT_READ, lambda events: self._on_ready(connection, events))

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._forget_wait(connection)
            self._connections.remove(connection)
            self._selector.unregister(connection.link)
            connection.link.close()

    def _on_ready(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(connection, b"")
            if events & selectors.EVENT_READ:
                data = connection.link.recv(1 << 16)
                if not data:
                    raise ConnectionResetError
                self._on_data(connection, data)
        except BlockingIOError:
            return
        except (OSError, ValueError, TypeError, LookupError, RecursionError):  # gone, or not one of ours
            self._drop(connection)

    def _send(self, connection: _Connection, data: bytes) -> None:
        connection.unsent += data
        try:
            del connection.unsent[: connection.link.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.link).events != events:
            self._selector.modify(connection.link, events, self._selector.get_key(connection.link).data)

    def _on_data(self, connection: _Connection, data: bytes) -> None:
        if not connection.is_client:
            self._send(connection, connection.greeting.feed(data))
            if not connection.greeting.done:
                return
            connection.is_client, connection.deadline = True, None
            data = connection.greeting.rest
        for kind, payload in connection.decoder.feed(data):
            operation, *arguments = json.loads(payload)
            if kind != REQUEST or connection.missing:
                raise ValueError("not a request")
            self._answer(connection, operation, arguments)

    # --- requests

    def _answer(self, connection: _Connection, operation: str, arguments: list[Any]) -> None:
        if operation == "await":
            paths, seconds = arguments
            connection.missing = {tuple(path) for path in self._table.apply("missing", paths)}
            for path in connection.missing:
                self._waiting.setdefault(path, set()).add(connection)
            connection.deadline = time.monotonic() + float(seconds)
            if not connection.missing:
                self._stop_waiting(connection)
            return
        try:
            result = self._table.apply(operation, *arguments)
        except InvalidArgumentError as error:
            self._send(connection, frames.encode(REFUSAL, str(error)))
            return
        self._send(connection, frames.encode(RESULT, [result]))
        if operation in WRITES and not self._table.apply("missing", arguments[:1]):
            self._tell(tuple(arguments[0]))

    def _tell(self, path: tuple[str, ...]) -> None:
        for connection in self._waiting.pop(path, ()):
            connection.missing.discard(path)
            if not connection.missing:
                self._stop_waiting(connection)

    def _stop_waiting(self, connection: _Connection) -> None:
        missing = [list(path) for path in connection.missing]
        self._forget_wait(connection)
        connection.deadline = None
        self._send(connection, frames.encode(RESULT, [missing]))

    def _forget_wait(self, connection: _Connection) -> None:
        for path in connection.missing:
            waiters = self._waiting.get(path, set())
            waiters.discard(connection)
            if not waiters:
                self._waiting.pop(path, None)
        connection.missing.clear()

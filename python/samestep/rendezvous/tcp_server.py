"""The thread in rank 0 that keeps the contents of a `TCPStore`."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from samestep._util import silence, users
from samestep._util.json_layout import Many, fits, loads
from samestep._util.strangers import Strangers
from samestep._util.text import warn
from samestep.errors import InvalidArgumentError
from samestep.rendezvous import same_user
from samestep.rendezvous.store import WRITES, Table
from samestep.rendezvous.tcp_address import (
    CLOSED,
    LEAVE,
    OPEN,
    REFUSAL,
    REQUEST,
    RESULT,
    Connection,
    address_text,
)

# Bytes that clients without a secret may store or have in progress.
_MAX_UNPROVED_NBYTES = 64 << 20
_LONGEST_WAIT_S = 1e7
_TICK_S = 1.0
_REQUEST = Many((str, float, Many((str, Many(str)))))
_AWAIT = [Many(Many(str)), float]


class Server:
    """Serves a table until `close`. Who is let in at the port has to know the secret.

    Args:
      listener: a listening socket, owned from now on.
      secret: of the job; empty where there is none. Then any client is accepted, but cannot store much, unless the
        listener is of the loopback interface: then nobody is, but for processes of this user at `local`.
      local: a listening socket of `same_user`, owned from now on; None where there is a secret.
      n_expected: clients that may connect at the same time.
    """

    def __init__(
        self, listener: socket.socket, secret: bytes, local: socket.socket | None = None, n_expected: int = 0
    ) -> None:
        self.private = bool(secret) or same_user.is_loopback(str(listener.getsockname()[0]))
        self._has_port = bool(secret) or not self.private  # at which ranks of this job are let in
        self._secret = secret if self._has_port else os.urandom(32)  # which nobody knows
        self._table = Table(None if self.private else _MAX_UNPROVED_NBYTES)
        self._connections: dict[socket.socket, Connection] = {}
        self._waiting: dict[tuple[str, ...], set[Connection]] = {}
        self._n_held = 0
        self._n_to_leave, self._all_left_at = n_expected, math.inf
        self._ends_at: float | None = None
        self._strangers = Strangers(f"the store's port {listener.getsockname()[1]}", warn, n_expected)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._listeners = [listener, *([local] if local is not None else [])]
        for one, accept in zip(self._listeners, (self._accept, self._accept_local), strict=False):
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ, partial(self._on_listener, one, accept))
        self._selector.register(self._woken, selectors.EVENT_READ, lambda _: self._woken.recv(64))
        self._thread = threading.Thread(target=self._serve, name="samestep-store", daemon=True)
        self._thread.start()

    def close(self, linger: float) -> None:
        """Ends when the last client has left, or after `linger` seconds; soon once so many as are expected say so."""
        self._ends_at = time.monotonic() + linger
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._ends_at is None or (self._has_clients() and time.monotonic() < self._last_moment()):
                for key, events in self._selector.select(self._patience()):
                    if self._selector.get_map().get(key.fd) is key:  # else closed by an act before this one
                        act: Callable[[int], object] = key.data
                        act(events)
                self._look_at_the_clock()
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._selector.close()
            for link in (*self._listeners, self._wake, self._woken):
                link.close()

    def _has_clients(self) -> bool:
        return any(connection.is_client for connection in self._connections.values())

    def _last_moment(self) -> float:
        assert self._ends_at is not None
        return min(self._ends_at, self._all_left_at + _TICK_S)  # strangers may stay

    def _patience(self) -> float:
        now = time.monotonic()
        times = [c.deadline - now for c in self._connections.values() if c.deadline is not None]
        if self._ends_at is not None:
            times.append(self._last_moment() - now)
        if (left := self._strangers.seconds_left()) is not None:
            times.append(left)
        return max(0.0, min([_TICK_S, *times]))

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for connection in [
            c for c in self._connections.values() if c.deadline is not None and c.deadline <= now
        ]:
            self._stop_waiting(connection)
        for link in self._strangers.late():
            self._refuse(self._connections[link], "it has not proved itself in time")

    # --- connections

    def _on_listener(
        self, listener: socket.socket, accept: Callable[[socket.socket, Any], None], _: int
    ) -> None:
        try:
            link, address = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is free: not to be asked again at once, for ever
            time.sleep(0.01)
            return
        link.setblocking(False)
        accept(link, address)

    def _accept(self, link: socket.socket, address: Any) -> None:
        silence.notice_silence(link)
        self._add(Connection(link, address_text(*address[:2]), self._secret, is_proof=self.private))
        if (oldest := self._strangers.add(link)) is not None:
            self._drop(self._connections[oldest])

    def _accept_local(self, link: socket.socket, _: Any) -> None:
        if not users.is_own(user := same_user.user_of(link)):
            self._strangers.report(f"{users.text(user)} of this host", "it is another user's process")
            link.close()
            return
        connection = Connection(link, "this user's processes", None, is_proof=True)
        self._add(connection)
        self._send(connection, CLOSED if self.private else OPEN)

    def _add(self, connection: Connection) -> None:
        self._connections[connection.link] = connection
        self._selector.register(connection.link, selectors.EVENT_READ, partial(self._on_ready, connection))

    def _drop(self, connection: Connection) -> None:
        if self._connections.pop(connection.link, None) is not None:
            self._forget_wait(connection)
            self._n_held -= connection.n_held
            self._strangers.remove(connection.link)
            self._selector.unregister(connection.link)
            connection.link.close()

    def _refuse(self, connection: Connection, why: str) -> None:
        self._strangers.report(connection.address, why)
        self._drop(connection)

    def _on_ready(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(connection, b"")
            if events & selectors.EVENT_READ:
                data = connection.link.recv(1 << 16)
                if not data:
                    greeting = connection.greeting
                    if self._has_port and greeting is not None and greeting.answered and not greeting.done:
                        self._strangers.report(connection.address, _OTHER_SECRET)
                    self._drop(connection)
                    return
                connection.heard_at = time.monotonic()
                self._on_data(connection, data)
            self._count(connection)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
        except Exception as error:  # whatever it has sent ends its own connection, and nothing else
            self._refuse(connection, str(error)[:200])

    def _make_room(self) -> None:
        """For a client without a secret, as for a stranger: of the host that has most, the one that says least goes."""
        clients = [one for one in self._connections.values() if one.is_client and not one.is_proved]
        of_host = Counter(one.host for one in clients)
        clients.sort(key=lambda one: (-of_host[one.host], bool(one.missing), one.heard_at))
        for one in clients if len(clients) >= self._strangers.most else ():
            if not one.has_spoken():
                self._drop(one)
                return

    def _count(self, connection: Connection) -> None:
        """Keep the pending bytes of clients without a secret below a limit, by closing the largest connection."""
        if connection.is_proved or connection.link not in self._connections:
            return
        before, connection.n_held = connection.n_held, connection.n_pending
        self._n_held += connection.n_held - before
        if self._n_held > _MAX_UNPROVED_NBYTES:
            self._refuse(
                max(self._connections.values(), key=lambda c: c.n_held), "clients hold too much memory"
            )

    def _send(self, connection: Connection, data: bytes) -> None:
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

    def _say(self, connection: Connection, kind: bytes, content: object) -> None:
        self._send(connection, connection.channel.seal(kind, content))

    def _on_data(self, connection: Connection, data: bytes) -> None:
        if not connection.is_client:
            assert connection.greeting is not None
            self._send(connection, connection.greeting.feed(data))
            if not connection.greeting.done:
                return
            if not connection.is_proved:
                self._make_room()
            connection.is_client = True
            self._strangers.remove(connection.link)
            connection.channel = connection.greeting.channel(most=connection.most)
            data = connection.greeting.remainder
        for kind, payload in connection.channel.feed(data):
            if connection.link not in self._connections:
                return
            if kind == LEAVE:
                self._n_to_leave -= 1
                self._all_left_at = time.monotonic() if self._n_to_leave == 0 else self._all_left_at
                continue
            if kind != REQUEST or connection.missing or connection.unsent:
                raise ValueError("not a request, or one before the last was answered")
            self._answer(connection, loads(payload, _REQUEST, most=connection.most))

    # --- requests

    def _answer(self, connection: Connection, request: list[Any]) -> None:
        operation, *arguments = request or [""]
        if operation == "await":
            self._await(connection, arguments)
            return
        try:
            result = self._table.apply(operation, *arguments)
        except InvalidArgumentError as error:
            self._say(connection, REFUSAL, str(error))
            return
        self._say(connection, RESULT, [result])
        if operation in WRITES and not self._table.apply("missing", arguments[:1]):
            self._tell(tuple(arguments[0]))

    def _await(self, connection: Connection, arguments: list[Any]) -> None:
        if not fits(arguments, _AWAIT):
            raise ValueError("await: not its arguments")
        paths, seconds = arguments
        connection.missing = {tuple(path) for path in self._table.apply("missing", paths)}
        for path in connection.missing:
            self._waiting.setdefault(path, set()).add(connection)
        connection.deadline = time.monotonic() + min(float(seconds), _LONGEST_WAIT_S)
        if not connection.missing:
            self._stop_waiting(connection)

    def _tell(self, path: tuple[str, ...]) -> None:
        for connection in self._waiting.pop(path, ()):
            connection.missing.discard(path)
            if not connection.missing:
                self._stop_waiting(connection)

    def _stop_waiting(self, connection: Connection) -> None:
        missing = [list(path) for path in connection.missing]
        self._forget_wait(connection)
        connection.deadline = None
        self._say(connection, RESULT, [missing])

    def _forget_wait(self, connection: Connection) -> None:
        for path in connection.missing:
            waiters = self._waiting.get(path, set())
            waiters.discard(connection)
            if not waiters:
                self._waiting.pop(path, None)
        connection.missing.clear()


_OTHER_SECRET = (
    "it left when it saw another secret than its own; if it is a rank of this job, give all ranks the same "
    "SAMESTEP_SECRET, or with `samestep run --nnodes` the same ~/.config/samestep/secret"
)

"""A store kept by one process, rank 0, and reached over TCP: its contents are in `tcp_server`."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from samestep._util import handshake, silence
from samestep._util.at_failure import at_failure
from samestep._util.frames import Channel
from samestep._util.json_layout import loads
from samestep.errors import (
    InvalidArgumentError,
    NotInitializedError,
    PeerLostError,
    TimeoutError,
    UnavailableError,
)
from samestep.rendezvous import same_user, tcp_address
from samestep.rendezvous.store import DEFAULT_TIMEOUT, RESERVED, RESULTS, Path, Store, seconds_of
from samestep.rendezvous.tcp_address import (
    CLOSED,
    LARGEST_FRAME,
    LEAVE,
    OPEN,
    REFUSAL,
    REQUEST,
    RESULT,
    address_text,
)
from samestep.rendezvous.tcp_server import Server

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5  # between attempts to connect
_RESULTS = {**RESULTS, "await": RESULTS["missing"]}
_CONNECT_S = 10.0  # for a host to answer at all
_LOOK_S = 1.0  # between checks that it still does
_GRACE_S = 5.0  # for an answer, on top of the time that was asked for


class _Link(NamedTuple):
    """A connection, and the frames on it."""

    socket: socket.socket
    channel: Channel


class Client:
    """Asks the server at an address. Threads do not wait for each other: each request has a connection of its own.

    Attributes:
      private: the server lets in processes of this job, or of this user, only, and has proved to be one itself.

    Args:
      host, port: where the server is.
      timeout: seconds to reach it at first; until then a refused connection is tried again.

    Raises:
      TimeoutError: nobody answers there.
      UnavailableError: something else does, or the store of another job.
    """

    def __init__(self, host: str, port: int, secret: bytes, timeout: float) -> None:
        self._host, self._port, self._secret = host, port, secret
        self.private = bool(secret)
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
            kind, payload = self._ask(self._take(patience), list(words), patience)
            if kind == REFUSAL:
                raise InvalidArgumentError(loads(payload, str))
            if kind != RESULT:
                raise ValueError("neither a result nor a refusal")
            (result,) = loads(payload, [_RESULTS[words[0]]], most=LARGEST_FRAME)
            _check(result, *words)
            return result
        except (InvalidArgumentError, TimeoutError):
            raise
        except ValueError as error:
            raise UnavailableError(
                f"what answers at {self._where} is not a store of samestep: {error}"
            ) from error
        except OSError as error:
            if isinstance(error, socket.timeout) and error.errno is None:  # else the kernel has ended it
                raise TimeoutError(
                    f"the store at {self._where} has not answered within {patience:g} s"
                ) from error
            raise PeerLostError(
                f"rank 0, which keeps the store at {self._where}, has ended: {error}"
            ) from error

    def _ask(self, link: _Link, request: list[Any], patience: float) -> tuple[bytes, bytes]:
        try:
            link.socket.settimeout(patience)
            link.socket.sendall(link.channel.seal(REQUEST, request))
            arrived: list[tuple[bytes, bytes]] = []
            while not arrived:
                data = _received(link.socket, patience)
                if not data:
                    raise ConnectionResetError("it has closed the connection")
                arrived = list(link.channel.feed(data))
            if len(arrived) > 1 or link.channel.n_waiting:
                raise ValueError("it sends more than an answer")
        except BaseException:
            link.socket.close()
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(link)
                return arrived[0]
        link.socket.close()
        return arrived[0]

    def close(self) -> None:
        """Leaves. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            if self._pid == os.getpid():  # in a fork the connection is still the parent's
                with contextlib.suppress(OSError):
                    if link is idle[0]:
                        link.socket.sendall(link.channel.seal(LEAVE))
                    link.socket.shutdown(socket.SHUT_RDWR)
            link.socket.close()

    def _take(self, patience: float) -> _Link:
        with self._lock:
            if self._pid != os.getpid():
                for link in self._idle:
                    link.socket.close()
                self._pid, self._idle = os.getpid(), []
            if self._closed:
                raise NotInitializedError(f"the store at {self._where} has been closed")
            while self._idle:
                link = self._idle.pop()
                if self.private or not _can_be_read(link.socket):
                    return link
                link.socket.close()  # a store without a secret has made room for others
        return self._connect(patience)

    def _connect_patiently(self, timeout: float) -> _Link:
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

    def _connect(self, timeout: float) -> _Link:
        if self._secret or not same_user.is_loopback(self._host):
            return self._connect_tcp(timeout)
        try:
            return self._connect_local(timeout)
        except ConnectionRefusedError:
            pass
        refusal = self._why_refused(timeout)
        with contextlib.suppress(ConnectionRefusedError):
            return self._connect_local(timeout)  # a store opens it before it answers at its port
        raise UnavailableError(refusal)

    def _why_refused(self, timeout: float) -> str:
        """As a text: an error in a variable keeps its frames, and what its callers hold, such as the world."""
        try:  # tells whether nobody is there, another program, or a store with a secret
            self._connect_tcp(timeout).socket.close()
        except UnavailableError as error:
            return str(error)
        return (
            f"the store at {self._where} has no secret and is kept by no process of this user on this host; give all "
            "ranks of the job one SAMESTEP_SECRET"
        )

    def _connect_local(self, timeout: float) -> _Link:
        link = same_user.connect(self._port, timeout)
        with at_failure(link.close):
            said = b""
            while len(said) < len(OPEN):
                data = link.recv(len(OPEN) - len(said))
                if not data:
                    raise ConnectionResetError("the connection was closed at once")
                said += data
            if said not in (OPEN, CLOSED):
                raise UnavailableError(
                    f"another program answers beside {self._where}; choose another port (MASTER_PORT, or in the URL)"
                )
        self.private = said == CLOSED
        return _Link(link, Channel(most=LARGEST_FRAME))

    def _connect_tcp(self, timeout: float) -> _Link:
        link = socket.create_connection((self._host, self._port), timeout=min(timeout, _CONNECT_S))
        with at_failure(link.close):
            if link.getsockname() == link.getpeername():  # where nobody listens this can happen by chance
                raise ConnectionRefusedError("nobody listens")
            link.settimeout(timeout)
            silence.notice_silence(link)
            return _Link(link, self._greet(link))

    def _greet(self, link: socket.socket) -> Channel:
        ours = handshake.Client(handshake.STORE, self._secret)
        try:
            handshake.greet(link, ours)
        except ValueError:
            raise UnavailableError(
                f"another program answers at {self._where}; choose another port (MASTER_PORT, or in the URL)"
            ) from None
        except PermissionError:
            raise UnavailableError(
                f"the store at {self._where} is another job's: SAMESTEP_SECRET differs; choose another port "
                "(MASTER_PORT, or in the URL), or give all ranks of the job the same secret (`samestep run --nnodes` "
                "takes it from ~/.config/samestep/secret of each node where it is not given)"
            ) from None
        return ours.channel(most=LARGEST_FRAME)


def _received(link: socket.socket, patience: float) -> bytes:
    """What arrives next. Raises OSError: nothing does in time, or the server's host does not answer."""
    until = time.monotonic() + patience
    while (left := until - time.monotonic()) > 0 and not _can_be_read(link, min(left, _LOOK_S)):
        if silence.is_silent(link):
            raise ConnectionAbortedError(f"its host has been silent for {silence.of_launcher():g} s")
    link.settimeout(0.001)  # it is there, or too late
    return link.recv(1 << 16)


def _can_be_read(link: socket.socket, seconds: float = 0.0) -> bool:
    """Whether the server has sent something, or has closed the connection."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return bool(poll.poll(math.ceil(1e3 * seconds)))


def _check(result: Any, operation: str, *arguments: Any) -> None:
    """What the layout of a result does not say. Raises ValueError."""
    if operation == "values" and len(result) != len(arguments[0]):
        raise ValueError(f"{len(result)} values of {len(arguments[0])} keys")
    for text in result if operation == "values" else [result] if operation == "compare_set" else []:
        if text is not None:
            text.encode("latin-1")


_LINGER_S = 1.0  # for clients to leave before the process that keeps the store
_WORKERS, _ALL_HERE = [RESERVED, "workers"], [RESERVED, "workers are here"]


class TCPStore(Store):
    """A store that one process keeps and others reach over TCP.

    Where `SAMESTEP_SECRET` is set, only processes with the same value are let in. Where it is not, a store at an
    address of the loopback interface ("localhost") lets in processes of this user only, and any other store
    everybody.

    Args:
      host_name: address or name of the host that keeps it. The master listens on all interfaces if this is a
        name (but "localhost") or empty.
      port: 0 lets the master choose; read it from `port`.
      world_size: how many stores are opened at this address, the master's among them.
      is_master: keep the store, in this process.
      timeout: to reach the master, and of `get` and `wait`; a timedelta or seconds.
      wait_for_workers: with `world_size`, return only when that many have opened it.
      secret: that others have to know; None: `SAMESTEP_SECRET`.

    Raises:
      InvalidArgumentError: a wrong host, port, count or time.
      TimeoutError: the master does not answer, or workers are missing.
      UnavailableError: the port is taken; or another program, or another job's store, answers at it.

    Example:
      >>> with_port = TCPStore("127.0.0.1", 0, is_master=True)
      >>> other = TCPStore("127.0.0.1", with_port.port)
      >>> other.set("key", "value")
      >>> with_port.get("key")
      b'value'
      >>> other.close(), with_port.close()
      (None, None)
    """

    def __init__(  # noqa: PLR0917 - positions that scripts rely on
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        *,
        secret: bytes | None = None,
    ) -> None:
        super().__init__(timeout)
        if world_size is not None and world_size < 1:
            raise InvalidArgumentError(f"TCPStore: world_size must be at least 1, got {world_size}")
        tcp_address.check_address(host_name, port)
        reached_at, server = host_name or "localhost", None
        secret = handshake.job_secret() if secret is None else secret
        if is_master:
            listener = tcp_address.listen(host_name, port)
            bound, port = listener.getsockname()[:2]
            reached_at = "127.0.0.1" if bound in ("0.0.0.0", "::") else bound
            with at_failure(listener.close):
                local = None if secret else same_user.listen(port)
                server = Server(listener, secret, local, world_size or 0)
        elif port == 0:
            raise InvalidArgumentError(
                "TCPStore: port 0 is for the master, which chooses one; give the one it chose"
            )
        self.host, self.port = host_name, port
        self.where = tcp_address.address_text(host_name, port)
        with at_failure(partial(server.close, 0.0)) if server is not None else contextlib.nullcontext():
            self._client = Client(reached_at, port, secret, seconds_of(timeout))
        self.private = server.private if server is not None else self._client.private
        self._leave = weakref.finalize(self, _leave, self._client, server, os.getpid())
        if world_size is not None and wait_for_workers:
            self._wait_for_workers(world_size)

    def _apply(self, operation: str, *arguments: Any) -> Any:
        return self._client.request(operation, *arguments, seconds=self._timeout)

    def _await(self, paths: Sequence[Path], seconds: float) -> list[Path]:
        seconds = max(0.0, seconds)
        missing = self._client.request("await", list(paths), seconds, seconds=seconds)
        return [path for path in paths if path in missing]

    def close(self, linger: float = _LINGER_S) -> None:
        """Leaves the store. The master's ends with it, after the others have left or `linger` seconds."""
        if (detached := self._leave.detach()) is not None:
            client, server, pid = detached[2]
            _leave(client, server, pid, linger)

    def _wait_for_workers(self, world_size: int) -> None:
        with at_failure(self.close):
            if self._apply("add", _WORKERS, 1) >= world_size:
                self._apply("set", _ALL_HERE, "")
            if self._await([_ALL_HERE], self._timeout):
                (n_here,) = self._apply("values", [_WORKERS])
                raise TimeoutError(
                    f"{n_here} of {world_size} workers have opened the store at {self.where} "
                    f"within {self._timeout:g} s"
                )


def _leave(client: Client, server: Server | None, pid: int, linger: float = _LINGER_S) -> None:
    client.close()
    if server is not None and pid == os.getpid():  # a fork has no server thread
        server.close(linger)

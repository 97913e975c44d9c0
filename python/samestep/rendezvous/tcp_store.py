"""A store kept by one process, rank 0, and reached over TCP."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from samestep._util import handshake
from samestep.errors import InvalidArgumentError, TimeoutError
from samestep.rendezvous import same_user, tcp_address
from samestep.rendezvous.store import DEFAULT_TIMEOUT, Store, seconds_of
from samestep.rendezvous.table import RESERVED, Path
from samestep.rendezvous.tcp_client import Client
from samestep.rendezvous.tcp_server import Server

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
            try:
                local = None if secret else same_user.listen(port)
                server = Server(listener, secret, local, world_size or 0)
            except BaseException:
                listener.close()
                raise
        elif port == 0:
            raise InvalidArgumentError(
                "TCPStore: port 0 is for the master, which chooses one; give the one it chose"
            )
        self.host, self.port = host_name, port
        self.where = tcp_address.address_text(host_name, port)
        try:
            self._client = Client(reached_at, port, secret, seconds_of(timeout))
        except BaseException:
            if server is not None:
                server.close(0.0)
            raise
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
        try:
            if self._apply("add", _WORKERS, 1) >= world_size:
                self._apply("set", _ALL_HERE, "")
            if self._await([_ALL_HERE], self._timeout):
                (n_here,) = self._apply("values", [_WORKERS])
                raise TimeoutError(
                    f"{n_here} of {world_size} workers have opened the store at {self.where} "
                    f"within {self._timeout:g} s"
                )
        except BaseException:
            self.close()
            raise


def _leave(client: Client, server: Server | None, pid: int, linger: float = _LINGER_S) -> None:
    client.close()
    if server is not None and pid == os.getpid():  # a fork has no server thread
        server.close(linger)

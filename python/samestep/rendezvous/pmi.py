"""The store of a process manager with PMI-1: Flux, Hydra and others of that family.

The manager gives each process a connection (`PMI_FD`), over which it keeps keys and values for the job and offers a
barrier. There rank 0 tells where its store listens, and where `SAMESTEP_SECRET` is not set, a key for this meeting; the
ranks then meet at that store. A secret that the user has set is not told: others may read the manager's store.

The wire protocol is that of "PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale Systems" (Balaji
and others, 2010), as Flux's RFC 13 writes it down: one line for each request and each answer, of words `key=value`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import select
import time
from collections.abc import Mapping

from samestep._util import handshake, launchers
from samestep._util.json_layout import loads
from samestep.errors import TimeoutError, UnavailableError
from samestep.rendezvous.tcp_store import TCPStore

FD, _RANK, _SIZE = launchers.PMI_FD, "PMI_RANK", "PMI_SIZE"
_LINE_NBYTES = 4096  # values have 1,024 at most

_clients: dict[int, Client] = {}  # by process, for a child of a fork has none


class Client:
    """One process's connection to its process manager.

    Raises:
      UnavailableError: the manager speaks another protocol, refuses, or has gone.
      TimeoutError: no answer.
    """

    def __init__(self, fd: int, timeout: float) -> None:
        self._fd, self._rest = fd, b""
        self._n_meetings = 0
        self.ask("init", timeout, pmi_version="1", pmi_subversion="1")
        self._kvsname = self.ask("get_my_kvsname", timeout)["kvsname"]

    def next_key(self) -> dict[str, str]:
        """What names a new key for each rendezvous, the same on all ranks."""
        self._n_meetings += 1
        return {"kvsname": self._kvsname, "key": f"samestep-{self._n_meetings}"}

    def ask(self, command: str, timeout: float, **words: str) -> dict[str, str]:
        """What the manager answers to a command."""
        line = " ".join([f"cmd={command}", *(f"{key}={value}" for key, value in words.items())])
        try:
            os.write(self._fd, f"{line}\n".encode())
            answer = self._read_line(command, time.monotonic() + timeout, timeout)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise UnavailableError(
                f"the process manager at {FD}={self._fd} does not answer {command}: {error}"
            ) from None
        found = dict(word.partition("=")[::2] for word in answer.split())
        if found.get("rc", "0") != "0" or "cmd" not in found:
            raise UnavailableError(f"the process manager refuses {command}: {answer[:200]!r}")
        return found

    def _read_line(self, command: str, end: float, timeout: float) -> str:
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._fd], [], [], left)[0]:
                what = "not all ranks have called initialize" if command == "barrier_in" else "no answer"
                raise TimeoutError(f"the process manager ({FD}): {command}: {what} within {timeout:g} s")
            data = os.read(self._fd, _LINE_NBYTES)
            if not data or len(self._rest) > _LINE_NBYTES:
                raise UnavailableError(f"the process manager at {FD}={self._fd} has closed the connection")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace")


def open_store(env: Mapping[str, str], timeout: float, address: str) -> tuple[TCPStore, int, int]:
    """The store at which the ranks meet, and this rank and their number. Collective; raises as `Client`.

    Args:
      timeout: seconds for each answer of the manager, and for all ranks to come.
      address: at which ranks of other hosts reach this one.
    """
    rank, size = int(env[_RANK]), int(env[_SIZE])
    client = _client(int(env[FD]), timeout)
    key = client.next_key()
    if rank == 0:
        secret = handshake.job_secret()
        told = "" if secret else secrets.token_hex(16)
        store = TCPStore(address, 0, is_master=True, timeout=timeout, secret=secret or told.encode())
        # Hexadecimal: values hold neither blanks nor "=".
        client.ask("put", timeout, **key, value=json.dumps([address, store.port, told]).encode().hex())
    client.ask("barrier_in", timeout)  # behind it all ranks see the key
    if rank != 0:
        try:
            host, port, told = loads(
                bytes.fromhex(client.ask("get", timeout, **key)["value"]), [str, int, str]
            )
        except ValueError as error:
            raise UnavailableError(
                f"the process manager has no address of rank 0 ({error}); does it run this version of samestep?"
            ) from error
        store = TCPStore(host, port, timeout=timeout, secret=told.encode() or None)
    return store, rank, size


def _client(fd: int, timeout: float) -> Client:
    if os.getpid() not in _clients:
        _clients.clear()
        _clients[os.getpid()] = Client(fd, timeout)
        atexit.register(_finalize, os.getpid())
    return _clients[os.getpid()]


def _finalize(pid: int) -> None:
    if os.getpid() == pid and (client := _clients.pop(pid, None)):
        with contextlib.suppress(UnavailableError, TimeoutError):  # the process ends anyway
            client.ask("finalize", 5.0)

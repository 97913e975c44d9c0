"""All ranks of a job come together at a store, and then exchange bytes until each can reach the others."""

from __future__ import annotations

import json
import os
import time

from samestep.errors import (
    Error,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
    TimeoutError,
    UnavailableError,
)
from samestep.launch.ending import ranks_text
from samestep.rendezvous import handlers, url
from samestep.rendezvous.file_store import FileStore
from samestep.rendezvous.store import PrefixStore, Store
from samestep.rendezvous.table import RESERVED
from samestep.rendezvous.tcp_address import address_text
from samestep.rendezvous.tcp_store import TCPStore
from samestep.rendezvous.torchrun import agent_store

__all__ = ["Meeting", "join", "meet"]

_TELL_S = 10.0
_WARN_S = 30.0
_ENDING_S = 5.0  # a store may take so long to end
_AGAIN_S = 0.02
_MET = "met"
_VERDICTS: dict[str, type[Error]] = {"MismatchError": MismatchError, "TimeoutError": TimeoutError}

_met_at: set[tuple[str, int]] = set()  # where this process has met already


class Meeting:
    """All ranks of a job, which have come together.

    Attributes:
      rank, size: of this rank.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float, *, owned: bool) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._owned = owned
        self._room = PrefixStore(RESERVED, store)
        self._timeout = timeout
        self._n_exchanges = 0
        self._closed = False

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank gave, by rank. Collective; any number of times.

        Raises:
          TimeoutError: names the ranks that gave nothing in time.
          PeerLostError: rank 0, which keeps the store, has ended.

        Example:
          >>> meeting = meet("tcp://127.0.0.1:0", rank=0, world_size=1, timeout=5)
          >>> meeting.exchange(b"mine")
          [b'mine']
          >>> meeting.close()
        """
        number, self._n_exchanges = self._n_exchanges, self._n_exchanges + 1
        room, complete = self._room, f"exchange {number}"
        room.set(f"{number} of {self.rank}", data)
        if room.add(f"{number} arrived", 1) == self.size:
            room.set(complete, b"")
        paths = room._paths([f"{number} of {rank}" for rank in range(self.size)])
        if room._await(room._paths([complete]), self._timeout):
            values = room._apply("values", paths)
            missing = [rank for rank, value in enumerate(values) if value is None]
            raise TimeoutError(
                f"exchange {number} at {self._store.where}: nothing came from {ranks_text(missing)} of {self.size} "
                f"within {self._timeout:g} s"
            )
        values = room._apply("values", paths)
        self._forget(number - 1)
        return [bytes(value, "latin-1") for value in values]

    @property
    def master(self) -> str:
        """Name or address of rank 0's host, as this rank was told; empty where they did not meet at one."""
        return str(getattr(self._store, "host", ""))

    def complain(self, text: str) -> None:
        """Tells the other ranks, for `complaint`, that this one cannot go on."""
        self._room.compare_set("complaint", b"", text)

    def complaint(self) -> str:
        """What a rank has complained of; empty if nothing."""
        return self._room.compare_set("complaint", b"", b"").decode()

    def close(self) -> None:
        """Leaves; collective in that nobody may exchange any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._owned:
            return
        if isinstance(self._store, FileStore):
            self._store.remove()  # at once: the next job may use the same path
        self._store.close()

    def _forget(self, number: int) -> None:
        """What nobody reads any more: every rank has begun the next exchange."""
        self._room.delete_key(f"{number} of {self.rank}")
        if self.rank == 0:
            self._room.delete_key(f"{number} arrived")
            self._room.delete_key(f"exchange {number}")


class _Patience:
    """The time that is left to meet, and what is said while it passes."""

    def __init__(self, timeout: float) -> None:
        self._begin = time.monotonic()
        self.timeout = timeout

    @property
    def left(self) -> float:
        return self._begin + self.timeout - time.monotonic()

    @property
    def spent(self) -> float:
        return time.monotonic() - self._begin

    @property
    def turn(self) -> float:
        """Until something is to be said, or the end."""
        return max(0.001, min(_TELL_S, self.left))

    def tell(self, text: str) -> None:
        waited = time.monotonic() - self._begin
        import logging  # costs as much to import as half the package

        log = logging.getLogger("samestep")
        log.log(logging.WARNING if waited >= _WARN_S else logging.INFO, "%s (%.0f s)", text, waited)


def meet(
    method: str = "env://", rank: int | None = None, world_size: int | None = None, timeout: float = 300.0
) -> Meeting:
    """Waits for all ranks of the job. Collective.

    Args:
      method: where: `env://` (under torchrun at its agent's store), `tcp://host:port` (of rank 0), `file:///path`,
        or a scheme that `register_rendezvous_handler` knows.
      rank, world_size: None = from the URL's query, else from the launcher.
      timeout: seconds for all ranks to come, and for each exchange.

    Raises:
      InvalidArgumentError: a wrong URL, rank or size; a file that is left over.
      UnavailableError: the port is taken, or the rank has joined already.
      MismatchError: the ranks do not agree on `world_size`.
      TimeoutError: names the ranks that did not come, and the address.

    Example:
      >>> meeting = meet("tcp://127.0.0.1:0?rank=0&world_size=1", timeout=5)
      >>> meeting.rank, meeting.size
      (0, 1)
      >>> meeting.close()
    """
    patience = _Patience(timeout)
    handled = handlers.open_store(method, rank, world_size)
    if handled is not None:
        store, rank, world_size = handled
        return join(store, rank, world_size, patience.left)
    how = url.parse(method, rank, world_size)
    if method.startswith("env://") and (kept := agent_store(how.host, how.port, patience.left)) is not None:
        return join(kept, how.rank, how.world_size, patience.left, owned=True)
    while True:
        store = FileStore(how.path, timeout=timeout) if how.path else _reach(how, patience)
        store.set_timeout(timeout)
        try:
            meeting = join(store, how.rank, how.world_size, patience.left, owned=True)
        except (PeerLostError, UnavailableError):
            store.close()
            if not _may_be_the_one_before(how, patience):
                raise
            time.sleep(_AGAIN_S)
        except BaseException:
            store.close()
            raise
        else:
            _met_at.add((how.host, how.port))
            return meeting


def _may_be_the_one_before(how: url.Method, patience: _Patience) -> bool:
    """Whether this process has come so soon again that rank 0 is still ending the meeting before."""
    seen = not how.path and how.rank != 0 and (how.host, how.port) in _met_at
    return seen and patience.spent < _ENDING_S and patience.left > 0


def _reach(how: url.Method, patience: _Patience) -> TCPStore:
    waits = f"rank {how.rank} of {how.world_size} waits for rank 0 at {address_text(how.host, how.port)}"
    while True:
        try:
            return TCPStore(how.host, how.port, is_master=how.rank == 0, timeout=patience.turn)
        except TimeoutError as error:
            if patience.left <= 0:
                text = f"{waits}, which did not come within {patience.timeout:g} s: {error.__cause__}"
                raise TimeoutError(text) from error
            patience.tell(f"{waits}: {error.__cause__}")
        except UnavailableError as error:
            raise UnavailableError(f"rank {how.rank} of {how.world_size} cannot join: {error}") from error


def join(store: Store, rank: int, world_size: int, timeout: float, *, owned: bool = False) -> Meeting:
    """Waits for all ranks at a store that is open. Collective; raises as `meet`.

    Args:
      store: used by this job alone.
      rank, world_size: of this rank.
      timeout: seconds, as in `meet`.
      owned: the meeting closes the store.

    Example:
      >>> from samestep.rendezvous.store import HashStore
      >>> join(HashStore(), 0, 1, timeout=5).exchange(b"mine")
      [b'mine']
    """
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(f"rank {rank} is outside a world_size of {world_size}")
    patience = _Patience(timeout)
    room = PrefixStore(RESERVED, store)
    token = os.urandom(8).hex().encode()
    if room.compare_set(f"rank {rank}", b"", token) != token:
        raise UnavailableError(
            f"rank {rank} has joined already at {store.where}: two processes have this rank, or another job meets "
            "at the same place; give each rank its own number and each job its own port or file"
        )
    first_size, first = json.loads(room.compare_set("world_size", b"", json.dumps([world_size, rank])))
    if first_size != world_size:
        text = f"world_size is {first_size} on rank {first} but {world_size} on rank {rank}, at {store.where}"
        _settle(room, "MismatchError", text)
        raise MismatchError(text)
    if room.add("joined", 1) == world_size:
        room.compare_set("verdict", b"", _MET)
    while room._await(room._paths(["verdict"]), patience.turn):
        missing = _missing(room, world_size)
        text = f"{ranks_text(missing)} of {world_size} did not join at {store.where}"
        if patience.left <= 0:
            _settle(
                room, "TimeoutError", f"{text} within {round(timeout, 1):g} s; rank {rank} waits no longer"
            )
        else:
            here = [r for r in range(world_size) if r not in missing]
            patience.tell(f"rank {rank} waits: {text} yet, {ranks_text(here)} did")
    verdict = room.get("verdict").decode()
    if verdict != _MET:
        kind, text = json.loads(verdict)
        raise _VERDICTS[kind](text)
    return Meeting(store, rank, world_size, timeout, owned=owned)


def _settle(room: Store, kind: str, text: str) -> None:
    """Ends the waiting of all ranks, unless it has ended already."""
    room.compare_set("verdict", b"", json.dumps([kind, text]))


def _missing(room: Store, world_size: int) -> list[int]:
    values = room._apply("values", room._paths([f"rank {rank}" for rank in range(world_size)]))
    return [rank for rank, value in enumerate(values) if value is None]

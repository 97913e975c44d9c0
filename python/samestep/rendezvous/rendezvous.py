"""The rendezvous of a job: all ranks join at a store, and exchange addresses until they are connected."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from samestep._util import launchers
from samestep._util.json_layout import loads
from samestep._util.text import ranks_text
from samestep.errors import (
    Error,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
    TimeoutError,
    UnavailableError,
)
from samestep.rendezvous import url
from samestep.rendezvous.file_store import FileStore
from samestep.rendezvous.store import RESERVED, PrefixStore, Store
from samestep.rendezvous.tcp_address import address_text
from samestep.rendezvous.tcp_store import TCPStore
from samestep.rendezvous.url import Method

_FRESH = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
_numbers = itertools.count()  # of meetings of this process, which all ranks have in one order
# Stores beside a group, by host and port. On rank 0 they listen as long as they are here.
_kept: dict[tuple[str, int], Any] = {}


def store_of_torch(how: Method, timeout: float) -> Store | None:
    """A part of that store for one rendezvous; None where rank 0 is to keep a store of samestep.

    All ranks decide alike: torchrun has started all of them, or all are in a group of `init_process_group`.

    Raises:
      UnavailableError: the store does not answer, or this environment has no torch.
    """
    env = launchers.own_variables()
    of_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = (how.host or "localhost", how.port)
    if not of_agent and place not in _kept and not _is_in_group():
        return None
    where = f"the store of {'torchrun' if of_agent else 'torch'} at {address_text(*place)}"
    try:
        import torch.distributed as dist

        from samestep.rendezvous.torch_store import TorchStore

        store = _kept.get(place) or dist.TCPStore(
            *place,
            is_master=how.rank == 0 and not of_agent,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,  # with the store of the group, where that is here
        )
    except ImportError as error:
        raise UnavailableError(f"{where} is reached with torch, which is not here: {error}") from error
    except dist.DistError as error:
        raise UnavailableError(f"{where} does not answer: {error}") from error
    if not of_agent:
        _kept[place] = store
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    rendezvous = TorchStore(dist.PrefixStore(f"samestep/{attempt}/{next(_numbers)}", store), timeout)
    rendezvous.where = where
    if of_agent:
        rendezvous.where += f", which remembers the members over restarts, unless it is started with {_FRESH}"
    return rendezvous


def _is_in_group() -> bool:
    """Whether this process has called `torch.distributed.init_process_group`."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


_LOG_INTERVAL_S = 10.0
_WARN_AFTER_S = 30.0
_SHUTDOWN_S = 5.0  # a store may take so long to end
_RETRY_S = 0.02
_COMPLETE = "complete"
_OUTCOMES: dict[str, type[Error]] = {"MismatchError": MismatchError, "TimeoutError": TimeoutError}

_joined_at: set[tuple[str, int]] = set()  # where this process has met already


class Rendezvous:
    """All ranks of a job, after they have joined at a store.

    Attributes:
      rank, size: of this rank.
      seconds: how long an exchange may take.
      where: the ranks have met, for messages.
      master: name or address of rank 0's host; empty if the store is not on a host.
      private: only ranks of this job, or processes of this user, can read the store.
      unanswered: ranks whose hosts have not answered this one when it wanted to connect, if that has failed.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float, *, owned: bool) -> None:
        self.rank, self.size, self.seconds = rank, size, timeout
        self.where, self.master = store.where, str(getattr(store, "host", ""))
        self.private = store.private
        self._store = store
        self._owned = owned
        self.unanswered: list[int] = []
        self._keys = PrefixStore(RESERVED, store)
        self._n_exchanges = 0
        self._closed = False

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. Collective; any number of times.

        Raises:
          TimeoutError: names the ranks that sent nothing in time.
          PeerLostError: rank 0, which keeps the store, has ended.

        Example:
          >>> rendezvous = open_rendezvous("tcp://127.0.0.1:0", rank=0, world_size=1, timeout=5)
          >>> rendezvous.allgather_bytes(b"mine")
          [b'mine']
          >>> rendezvous.close()
        """
        number, self._n_exchanges = self._n_exchanges, self._n_exchanges + 1
        keys, complete = self._keys, f"exchange {number}"
        keys.set(f"{number} of {self.rank}", data)
        if keys.add(f"{number} arrived", 1) == self.size:
            keys.set(complete, b"")
        paths = keys._paths([f"{number} of {rank}" for rank in range(self.size)])
        if keys._await(keys._paths([complete]), self.seconds):
            values = keys._apply("values", paths)
            missing = [rank for rank, value in enumerate(values) if value is None]
            raise TimeoutError(
                f"exchange {number} at {self.where}: nothing came from {ranks_text(missing)} of {self.size} "
                f"within {self.seconds:g} s"
            )
        values = keys._apply("values", paths)
        if None in values:
            lost = f"what rank {values.index(None)} sent"
            raise UnavailableError(f"exchange {number}: the store at {self.where} has lost {lost}")
        self._forget(number - 1)
        return [bytes(value, "latin-1") for value in values]

    def allgather_json(self, fact: Any, layout: Any) -> list[Any]:
        """Every rank's value, by rank, with tuples as lists. Collective; raises as `allgather_bytes`.

        Args:
          fact: what JSON can hold.
          layout: of each rank's, as `samestep._util.json_layout.fits` has it.

        Raises:
          MismatchError: a rank sent a value of another layout.
        """
        return facts_of(self.allgather_bytes(json.dumps(fact).encode()), layout, self, {})

    def report_failure(self, text: str) -> None:
        """Publish that this rank has failed; the others see it in `failure`."""
        self._keys.compare_set("failure", b"", text)

    def failure(self) -> str:
        """The failure that a rank has published; empty if none."""
        return self._keys.compare_set("failure", b"", b"").decode(errors="replace")

    def close(self, linger: float | None = None) -> None:
        """Leave. No rank may call an exchange afterwards. Idempotent.

        Rank 0 waits up to `linger` seconds for the others to leave; None: as the store has it.
        """
        if self._closed:
            return
        self._closed = True
        if not self._owned:
            return
        if isinstance(self._store, FileStore):
            self._store.remove()  # at once: the next job may use the same path
        if isinstance(self._store, TCPStore) and linger is not None:
            self._store.close(linger)
        else:
            self._store.close()

    def _forget(self, number: int) -> None:
        """Delete the keys of an exchange that no rank reads any more: all have started the next one."""
        self._keys.delete_key(f"{number} of {self.rank}")
        if self.rank == 0:
            self._keys.delete_key(f"{number} arrived")
            self._keys.delete_key(f"exchange {number}")


def facts_of(
    entries: Sequence[bytes], layout: Any, at: Rendezvous | Store, known: dict[bytes, Any]
) -> list[Any]:
    """The value of each rank, from its text, which was gathered `at` a place. Raises as `Rendezvous.allgather_json`.

    What a text holds is looked up in `known`, and kept there: most ranks say the same.
    """
    for rank, entry in enumerate(entries):
        try:
            if entry not in known:
                known[entry] = loads(entry, layout)
        except ValueError as error:
            raise MismatchError(
                f"the message of rank {rank} at {at.where} is malformed ({error}); does it run this version of "
                "samestep?"
            ) from error
    return [known[entry] for entry in entries]


class Deadline:
    """The time left to join, and the messages logged meanwhile."""

    def __init__(self, timeout: float) -> None:
        self._end = time.monotonic() + timeout
        self.timeout = timeout

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    @property
    def interval(self) -> float:
        """Seconds until the next message, or the end."""
        return max(0.001, min(_LOG_INTERVAL_S, self.left))

    def log_progress(self, text: str) -> None:
        """Logs what is waited for; a warning after half a minute."""
        waited = self.timeout - self.left
        import logging  # costs as much to import as half the package

        log = logging.getLogger("samestep")
        log.log(logging.WARNING if waited >= _WARN_AFTER_S else logging.INFO, "%s (%.0f s)", text, waited)


def open_rendezvous(
    method: str = "env://", rank: int | None = None, world_size: int | None = None, timeout: float = 300.0
) -> Rendezvous:
    """Wait for all ranks of the job. Collective.

    Args:
      method: where: `env://` (at torch's store where torchrun, or a group of this process, keeps one there),
        `tcp://host:port` (of rank 0), `file:///path`, or a scheme that `register_rendezvous_handler` knows.
      rank, world_size: None = from the URL's query, else from the launcher.
      timeout: seconds until all ranks have joined, and for each exchange.

    Raises:
      InvalidArgumentError: a wrong URL, rank or size; a file that is left over.
      UnavailableError: the port is taken, or the rank has joined already.
      MismatchError: the ranks do not agree on `world_size`.
      TimeoutError: names the ranks that did not join, and the address.

    Example:
      >>> rendezvous = open_rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1", timeout=5)
      >>> rendezvous.rank, rendezvous.size
      (0, 1)
      >>> rendezvous.close()
    """
    deadline = Deadline(timeout)
    handled = url.open_store(method, rank, world_size)
    if handled is not None:
        store, rank, world_size = handled
        return join(store, rank, world_size, deadline.left)
    how = url.parse(method, rank, world_size)
    if method.startswith("env://") and (kept := store_of_torch(how, deadline.left)) is not None:
        return join(kept, how.rank, how.world_size, deadline.left, owned=True)
    while True:
        store = FileStore(how.path, timeout=timeout) if how.path else _reach(how, deadline)
        store.set_timeout(timeout)
        try:
            rendezvous = join(store, how.rank, how.world_size, deadline.left, owned=True)
        except (PeerLostError, UnavailableError):
            store.close()
            # Rank 0 may still be closing the store of this process's previous rendezvous.
            seen = not how.path and how.rank != 0 and (how.host, how.port) in _joined_at
            if not (seen and timeout - deadline.left < _SHUTDOWN_S and deadline.left > 0):
                raise
            time.sleep(_RETRY_S)
        except BaseException:
            store.close()
            raise
        else:
            _joined_at.add((how.host, how.port))
            return rendezvous


def _reach(how: url.Method, deadline: Deadline) -> TCPStore:
    waits = f"rank {how.rank} of {how.world_size} waits for rank 0 at {address_text(how.host, how.port)}"
    while True:
        try:
            return TCPStore(
                how.host,
                how.port,
                how.world_size,
                is_master=how.rank == 0,
                timeout=deadline.interval,
                wait_for_workers=False,
            )
        except TimeoutError as error:
            if deadline.left <= 0:
                text = f"{waits}, which did not join within {deadline.timeout:g} s: {error.__cause__}"
                raise TimeoutError(text) from error
            deadline.log_progress(f"{waits}: {error.__cause__}")
        except UnavailableError as error:
            raise UnavailableError(f"rank {how.rank} of {how.world_size} cannot join: {error}") from error


def join(store: Store, rank: int, world_size: int, timeout: float, *, owned: bool = False) -> Rendezvous:
    """Waits for all ranks at a store that is open. Collective; raises as `open_rendezvous`.

    Args:
      store: used by this job alone.
      rank, world_size: of this rank.
      timeout: seconds, as in `open_rendezvous`.
      owned: the rendezvous closes the store.

    Example:
      >>> from samestep.rendezvous.store import HashStore
      >>> join(HashStore(), 0, 1, timeout=5).allgather_bytes(b"mine")
      [b'mine']
    """
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(f"rank {rank} is outside a world_size of {world_size}")
    deadline = Deadline(timeout)
    keys = PrefixStore(RESERVED, store)
    token = os.urandom(8).hex().encode()
    if keys.compare_set(f"rank {rank}", b"", token) != token:
        raise UnavailableError(
            f"rank {rank} has joined already at {store.where}: two processes have this rank, or another job meets "
            "at the same place; give each rank its own number and each job its own port or file"
        )
    received = keys.compare_set("world_size", b"", json.dumps([world_size, rank]))
    first_size, first = _loads(received, [int, int], store.where)
    if first_size != world_size:
        text = f"world_size is {first_size} on rank {first} but {world_size} on rank {rank}, at {store.where}"
        _decide(keys, "MismatchError", text)
        raise MismatchError(text)
    if keys.add("joined", 1) == world_size:
        keys.compare_set("outcome", b"", _COMPLETE)
    while text := wait_for_ranks(keys, ["outcome"], rank, world_size, deadline):
        _decide(keys, "TimeoutError", text)
    outcome = keys.get("outcome").decode(errors="replace")
    if outcome != _COMPLETE:
        kind, text = _loads(outcome.encode(), [str, str], store.where)
        raise _OUTCOMES.get(kind, UnavailableError)(text)
    return Rendezvous(store, rank, world_size, timeout, owned=owned)


def wait_for_ranks(keys: Store, awaited: list[str], rank: int, size: int, deadline: Deadline) -> str:
    """Waits for the keys `awaited`, and logs meanwhile which ranks have not joined.

    Returns:
      Which ones those are when the time is over; "" once the keys are there.
    """
    while keys._await(keys._paths(awaited), deadline.interval):
        values = keys._apply("values", keys._paths([f"rank {rank}" for rank in range(size)]))
        missing = [rank for rank, value in enumerate(values) if value is None]
        text = f"{ranks_text(missing)} of {size} did not join at {keys.where}"
        if deadline.left <= 0:
            return f"{text} within {round(deadline.timeout, 1):g} s; rank {rank} waits no longer"
        here = [r for r in range(size) if r not in missing]
        deadline.log_progress(f"rank {rank} waits: {text} yet, {ranks_text(here)} did")
    return ""


def _loads(received: bytes, layout: list[type], where: str) -> Any:
    try:
        return loads(received, layout)
    except ValueError as error:
        raise UnavailableError(f"the data at {where} is not a rendezvous of ranks: {error}") from error


def _decide(keys: Store, kind: str, text: str) -> None:
    """End the waiting of all ranks with this error, unless an outcome is set already."""
    keys.compare_set("outcome", b"", json.dumps([kind, text]))

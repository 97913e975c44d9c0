"""torch's store as a store of samestep, so that ranks can use it for their rendezvous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from samestep.errors import PeerLostError
from samestep.rendezvous.store import Path, Store

_SEPARATOR = "/"


class TorchStore(Store):
    """A `torch.distributed.Store` with the operations of samestep's.

    Example:
      >>> store = TorchStore(dist.HashStore(), timeout=5)
      >>> store.set("a", b"\\x00\\xff")
      >>> store.get("a"), store.check(["b"])
      (b'\\x00\\xff', False)
    """

    def __init__(self, store: Any, timeout: float) -> None:
        super().__init__(timeout)
        self._store = store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self.host = str(getattr(store, "host", ""))
        named = getattr(store, "path", f"torch's {type(store).__name__}")
        self.where = f"{self.host}:{store.port}" if hasattr(store, "host") else str(named)

    def _apply(self, operation: str, *arguments: Any) -> Any:
        try:
            return _OPERATIONS[operation](self._store, *arguments)
        except dist.DistNetworkError as error:
            raise PeerLostError(f"the store at {self.where} does not answer any more: {error}") from error

    def _await(self, paths: Sequence[Path], seconds: float) -> list[Path]:
        try:
            self._store.wait([_key(path) for path in paths], timedelta(seconds=max(0.001, seconds)))
        except dist.DistNetworkError as error:
            raise PeerLostError(f"the store at {self.where} does not answer any more: {error}") from error
        except RuntimeError:  # the time is over: a DistStoreError, but from a FileStore
            if missing := _missing(self._store, paths):
                return missing
        return []


def _key(path: Path) -> str:
    return _SEPARATOR.join(path)


def _missing(store: Any, paths: Sequence[Path]) -> list[Path]:
    if store.check([_key(path) for path in paths]):  # mostly: one question for all
        return []
    return [path for path in paths if not store.check([_key(path)])]


def _values(store: Any, paths: Sequence[Path]) -> list[str | None]:
    missing = _missing(store, paths)
    found = iter(store.multi_get([_key(path) for path in paths if path not in missing]))
    return [None if path in missing else str(next(found), "latin-1") for path in paths]


def _present(store: Any, paths: Sequence[Path]) -> list[bytes]:
    keys = [_key(path) for path in paths]
    # `multi_get` asks twice: it waits for the keys first.
    return store.multi_get(keys) if len(keys) > 1 else [store.compare_set(keys[0], b"?", b"?")]


def _set(store: Any, path: Path, value: str) -> None:
    store.set(_key(path), bytes(value, "latin-1"))


def _compare_set(store: Any, path: Path, expected: str, desired: str) -> str:
    now = store.compare_set(_key(path), bytes(expected, "latin-1"), bytes(desired, "latin-1"))
    return str(now, "latin-1")


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "set": _set,
    "add": lambda store, path, amount: store.add(_key(path), amount),
    "compare_set": _compare_set,
    "delete": lambda store, path: store.delete_key(_key(path)),
    "values": _values,
    "present": _present,
    "missing": _missing,
}

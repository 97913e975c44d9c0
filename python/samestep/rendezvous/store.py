"""Stores: keys and values that several ranks see, and that they can wait for."""

from __future__ import annotations

import abc
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from samestep._util.deadline import seconds
from samestep._util.json_layout import Many, fits
from samestep.errors import InvalidArgumentError, TimeoutError

Path = Sequence[str]  # the prefixes, outermost first, and the key

RESERVED = "\0samestep"
"""First prefix of what samestep itself keeps in a user's store; not counted as the user's."""

WRITES = frozenset(("set", "add", "compare_set", "delete"))
_NUMBER = re.compile(r"-?[0-9]{1,19}")
_ENTRY_NBYTES = 200  # that Python needs for an entry, beside its text

_PATH = Many(str)


class Table:
    """The contents of a store, by path; `apply` is the only entry. Pure: no clock, no lock, no socket.

    Operations, paths and results are JSON values, so a store can send them to another process or write them down. Bytes
    travel as text of the same length (latin-1). Clients may be strangers, so arguments are checked before use.

    Args:
      most_nbytes: of all paths and values, and of one answer; None: as many as there is memory for.

    Example:
      >>> table = Table()
      >>> table.apply("add", ["epoch"], 2), table.apply("values", [["epoch"], ["absent"]])
      (2, ['2', None])
    """

    def __init__(self, most_nbytes: int | None = None) -> None:
        self._values: dict[tuple[str, ...], str] = {}
        self._most = most_nbytes
        self._nbytes = 0

    def apply(self, operation: str, *arguments: Any) -> Any:
        """Apply one operation and return its result.

        Raises:
          InvalidArgumentError: `add` to a value that is not a number, or beyond 64 bits; the table is full.
          ValueError: not an operation, or not its arguments.
        """
        known = _OPERATIONS.get(operation) if isinstance(operation, str) else None
        if known is None or not fits(arguments, known[1]):
            raise ValueError(f"a store has no operation {str(operation)[:40]!r} with such arguments")
        return known[0](self, *arguments)

    def _set(self, path: Path, value: str) -> None:
        if not path:
            raise ValueError("a key is missing")
        value.encode("latin-1")  # or others could not read it
        key = tuple(path)
        if self._most is not None:
            before = self._cost(key, self._values[key]) if key in self._values else 0
            grown = self._nbytes - before + self._cost(key, value)
            if grown > self._most:
                raise InvalidArgumentError(_FULL)
            self._nbytes = grown
        self._values[key] = value

    @staticmethod
    def _cost(key: tuple[str, ...], value: str) -> int:
        return _ENTRY_NBYTES * (1 + len(key)) + sum(map(len, key)) + len(value)

    def _add(self, path: Path, amount: int) -> int:
        before = self._values.get(tuple(path), "0")
        if not _NUMBER.fullmatch(before):
            raise InvalidArgumentError(
                f"add: the value of key {path[-1]!r} is {before[:40]!r}, which is not a number"
            )
        total = int(before) + amount
        if not fits(total, int):
            raise InvalidArgumentError(f"add: the value of key {path[-1]!r} would not fit into 64 bits")
        self._set(path, str(total))
        return total

    def _compare_set(self, path: Path, expected: str, desired: str) -> str:
        now = self._values.get(tuple(path))
        if now == expected or (now is None and not expected):
            self._set(path, desired)
            now = desired
        return expected if now is None else now

    def _delete(self, path: Path) -> bool:
        key = tuple(path)
        value = self._values.pop(key, None)
        if value is not None and self._most is not None:
            self._nbytes -= self._cost(key, value)
        return value is not None

    def _read(self, paths: Sequence[Path]) -> list[str | None]:
        found = [self._values.get(tuple(path)) for path in paths]
        if self._most is not None and sum(len(value) for value in found if value) > self._most:
            raise InvalidArgumentError(_FULL)
        return found

    def _missing(self, paths: Sequence[Path]) -> list[Path]:
        return [path for path in paths if tuple(path) not in self._values]

    def _count(self, prefix: Path) -> int:
        """Paths under `prefix`; from the root those of the user alone."""
        above = tuple(prefix)
        return sum(
            path[: len(above)] == above and (bool(above) or path[:1] != (RESERVED,)) for path in self._values
        )


_FULL = "the store is full: open to everybody, it keeps little; give all ranks one SAMESTEP_SECRET"
# With the layouts of arguments and result.
_OPERATIONS: dict[str, tuple[Callable[..., Any], list[Any], Any]] = {
    "set": (Table._set, [_PATH, str], None),
    "add": (Table._add, [_PATH, int], int),
    "compare_set": (Table._compare_set, [_PATH, str, str], str),
    "delete": (Table._delete, [_PATH], bool),
    "values": (Table._read, [Many(_PATH)], Many((str, None))),
    "missing": (Table._missing, [Many(_PATH)], Many(_PATH)),
    "count": (Table._count, [_PATH], int),
}
RESULTS = {operation: result for operation, (_, _, result) in _OPERATIONS.items()}
"""Layout of what each operation returns."""


DEFAULT_TIMEOUT = timedelta(seconds=300)


def seconds_of(timeout: timedelta | float) -> float:
    """`timeout` in seconds.

    Raises:
      TypeError: neither a timedelta nor a number.
      InvalidArgumentError: not above 0, or longer than any wait.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (timedelta, int, float)):
        raise TypeError(f"timeout must be a datetime.timedelta or seconds, got {type(timeout).__name__}")
    return seconds(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)


class Store(abc.ABC):
    """Keys (`str`) with values (`bytes`) that every rank may read, change and wait for.

    Each operation is atomic. A store may be used by several threads, and without a process group.

    Args:
      timeout: of `get` and `wait`, a timedelta or seconds.

    Example:
      >>> store = HashStore()
      >>> store.set("a", "1")
      >>> store.get("a"), store.add("a", 4), store.check(["a", "b"])
      (b'1', 5, False)
    """

    _prefix: tuple[str, ...] = ()
    where = "this process"
    """Where it is kept, for messages."""
    private = False
    """Whether only processes of this job, or of this user, can reach it: a secret that is kept there is one."""

    def __init__(self, timeout: timedelta | float = DEFAULT_TIMEOUT) -> None:
        self._timeout = seconds_of(timeout)

    @abc.abstractmethod
    def _apply(self, operation: str, *arguments: Any) -> Any:
        """`Table.apply` on the contents that all ranks share."""

    @abc.abstractmethod
    def _await(self, paths: Sequence[Path], seconds: float) -> list[Path]:
        """Waits until all of `paths` exist, at most `seconds`; returns those that do not."""

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Changes how long `get` and `wait` wait. Raises as the constructor."""
        self._timeout = seconds_of(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Stores `value` under `key`."""
        self._apply("set", self._path(key), _text(value))

    def get(self, key: str) -> bytes:
        """The value of `key`, which is waited for.

        Raises:
          TimeoutError: nobody has set it in time; names the key.
          PeerLostError: the process that keeps the store has ended.
        """
        path = self._path(key)
        deadline = time.monotonic() + seconds_of(self.timeout)
        while True:
            missing = self._await([path], deadline - time.monotonic())
            (value,) = self._apply("values", [path]) if not missing else (None,)
            if value is not None:
                return bytes(value, "latin-1")
            if missing or time.monotonic() > deadline:  # somebody may delete it again and again
                raise TimeoutError(f"get: nobody has set key {key!r} within {self.timeout} ({self.where})")

    def add(self, key: str, amount: int) -> int:
        """Adds to the number under `key`, absent counting as 0, and returns the sum.

        Raises:
          InvalidArgumentError: the value is not a number; names the key.
        """
        return int(self._apply("add", self._path(key), int(amount)))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Waits until all `keys` exist.

        Raises:
          TimeoutError: names those that do not.
        """
        seconds = seconds_of(self.timeout if timeout is None else timeout)
        missing = self._await(self._paths(keys), seconds)
        if missing:
            names = ", ".join(repr(path[-1]) for path in missing)
            raise TimeoutError(f"wait: nobody has set {names} within {seconds:g} s ({self.where})")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` exist now."""
        return not self._apply("missing", self._paths(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Stores `desired` if the value is `expected`, or if there is none and `expected` is empty.

        Returns:
          The value after that; `expected` where there is none.
        """
        now = self._apply("compare_set", self._path(key), _text(expected), _text(desired))
        return bytes(now, "latin-1")

    def delete_key(self, key: str) -> bool:
        """Removes `key`; whether it existed."""
        return bool(self._apply("delete", self._path(key)))

    def num_keys(self) -> int:
        """How many keys users have set; those of a `PrefixStore` are those under its prefix."""
        return int(self._apply("count", list(self._prefix)))

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Lets go of what the store holds. Idempotent."""

    def _path(self, key: str) -> list[str]:
        if not isinstance(key, str):
            raise TypeError(f"key must be a str, got {type(key).__name__}")
        return [*self._prefix, key]

    def _paths(self, keys: Sequence[str]) -> list[Path]:
        if isinstance(keys, str):
            raise TypeError("keys must be a list of str, got one str")
        return [self._path(key) for key in keys]


def _text(value: str | bytes) -> str:
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"value must be str or bytes, got {type(value).__name__}")
    return str(value, "latin-1")


class HashStore(Store):
    """A store for the threads of one process."""

    private = True

    def __init__(self, timeout: timedelta | float = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._table = Table()
        self._changed = threading.Condition()

    def _apply(self, operation: str, *arguments: Any) -> Any:
        with self._changed:
            if operation in WRITES:
                self._changed.notify_all()
            return self._table.apply(operation, *arguments)

    def _await(self, paths: Sequence[Path], seconds: float) -> list[Path]:
        with self._changed:
            self._changed.wait_for(lambda: not self._table.apply("missing", paths), max(0.0, seconds))
            return list(self._table.apply("missing", paths))


class PrefixStore(Store):
    """A part of another store: its keys meet no keys of another prefix, nor those without one.

    Its timeout is that of the other store.

    Example:
      >>> store = HashStore()
      >>> PrefixStore("a", store).set("key", "1")
      >>> PrefixStore("a", store).num_keys(), store.check(["key"]), PrefixStore("b", store).num_keys()
      (1, False, 0)
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a str, got {type(prefix).__name__}")
        self._store = store
        self._prefix = (*store._prefix, prefix)
        self.where = store.where
        self.private = store.private

    @property
    def timeout(self) -> timedelta:
        """That of the store below."""
        return self._store.timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Changes that of the store below."""
        self._store.set_timeout(timeout)

    def _apply(self, operation: str, *arguments: Any) -> Any:
        return self._store._apply(operation, *arguments)

    def _await(self, paths: Sequence[Path], seconds: float) -> list[Path]:
        return self._store._await(paths, seconds)

"""The contents of a store, and every atomic operation on them. Pure: no clock, no lock, no socket.

Operations, paths and results are JSON values, so a store can send them to another process or write them down. Bytes
travel as text of the same length (latin-1). Clients may be strangers, so arguments are checked before use, and
a table can be bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from samestep._util.json_layout import Many, fits
from samestep.errors import InvalidArgumentError

Path = Sequence[str]  # the prefixes, outermost first, and the key

RESERVED = "\0samestep"
"""First prefix of what samestep itself keeps in a user's store; not counted as the user's."""

WRITES = frozenset(("set", "add", "compare_set", "delete"))
_NUMBER = re.compile(r"-?[0-9]{1,19}")
_ENTRY_NBYTES = 200  # that Python needs for an entry, beside its text

_PATH = Many(str)


class Table:
    """Values by path; `apply` is the only entry.

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

"""The contents of a store, and every atomic operation on them. Pure: no clock, no lock, no socket.

Operations, paths and results are JSON values, so a store can send them to another process or write them down. Bytes
travel as text of the same length (latin-1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from samestep.errors import InvalidArgumentError

__all__ = ["RESERVED", "WRITES", "Path", "Table"]

Path = Sequence[str]  # the prefixes, outermost first, and the key

RESERVED = "\0samestep"
"""First prefix of what samestep itself keeps in a user's store; not counted as the user's."""

WRITES = frozenset(("set", "add", "compare_set", "delete"))
_NUMBER = re.compile(r"-?[0-9]+")


class Table:
    """Values by path; `apply` is the only way in.

    Example:
      >>> table = Table()
      >>> table.apply("add", ["epoch"], 2), table.apply("values", [["epoch"], ["absent"]])
      (2, ['2', None])
    """

    def __init__(self) -> None:
        self._values: dict[tuple[str, ...], str] = {}

    def apply(self, operation: str, *arguments: Any) -> Any:
        """Carries out one operation and returns its result.

        Raises:
          InvalidArgumentError: `add` to a value that is no number.
          ValueError, TypeError: not an operation, or not its arguments.
        """
        act = _OPERATIONS.get(operation)
        if act is None:
            raise ValueError(f"a store has no operation {operation!r}")
        return act(self, *arguments)

    def _set(self, path: Path, value: str) -> None:
        self._values[tuple(path)] = value

    def _add(self, path: Path, amount: int) -> int:
        before = self._values.get(tuple(path), "0")
        if not _NUMBER.fullmatch(before):
            raise InvalidArgumentError(
                f"add: the value of key {path[-1]!r} is {before[:40]!r}, which is no number"
            )
        self._values[tuple(path)] = str(int(before) + int(amount))
        return int(before) + int(amount)

    def _compare_set(self, path: Path, expected: str, desired: str) -> str:
        now = self._values.get(tuple(path))
        if now == expected or (now is None and not expected):
            now = self._values[tuple(path)] = desired
        return expected if now is None else now

    def _delete(self, path: Path) -> bool:
        return self._values.pop(tuple(path), None) is not None

    def _read(self, paths: Sequence[Path]) -> list[str | None]:
        return [self._values.get(tuple(path)) for path in paths]

    def _missing(self, paths: Sequence[Path]) -> list[Path]:
        return [path for path in paths if tuple(path) not in self._values]

    def _count(self, prefix: Path) -> int:
        """Paths under `prefix`; from the root those of the user alone."""
        above = tuple(prefix)
        return sum(
            path[: len(above)] == above and (bool(above) or path[0] != RESERVED) for path in self._values
        )


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "set": Table._set,
    "add": Table._add,
    "compare_set": Table._compare_set,
    "delete": Table._delete,
    "values": Table._read,
    "missing": Table._missing,
    "count": Table._count,
}

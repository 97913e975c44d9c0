"""`@pytest.mark.ranks(...)`: its arguments, and the jobs (size and backend) that a test runs in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

MARKER_HELP = (
    "ranks(*sizes, dies=(), fresh=False, timeout=None, backends=None): run the test once per size, on that "
    "many ranks at once; dies: ranks that the test kills; fresh: interpreters of its own; timeout: seconds; "
    "backends: names to use instead of the ini option samestep_backends"
)

ONE_RANK_BACKENDS = frozenset({"self"})
WITHOUT_MPI = frozenset({"self", "native", "tcp", "halving", "hosts", "nccl"})


class World(NamedTuple):
    """Where one test item runs: how many ranks, and the backend of its `group` (None: it uses none)."""

    size: int
    backend: str | None

    def __str__(self) -> str:
        return f"{self.backend}-{self.size}" if self.backend else f"ranks-{self.size}"


@dataclass(frozen=True)
class Ranks:
    """A checked `ranks` mark."""

    sizes: tuple[int, ...]
    dies: frozenset[int] = frozenset()
    fresh: bool = False
    timeout: float | None = None
    backends: tuple[str, ...] | None = None

    @property
    def alone(self) -> bool:
        """Whether the test gets a launch of its own, which no other test uses before or after it."""
        return self.fresh or bool(self.dies)

    def jobs(self, backends: Sequence[str], *, with_group: bool) -> list[World]:
        """The jobs to run in: every size on every backend that supports it, or every size once.

        One rank is the same on every backend, so it runs only on `self` where `backends` has that.

        Args:
          backends: names to use where the mark names none; `self` has one rank only.
          with_group: whether the test asks for the fixture `group`.

        Example:
          >>> Ranks((1, 2)).jobs(["self", "native"], with_group=True)
          [World(size=1, backend='self'), World(size=2, backend='native')]
          >>> Ranks((1, 2)).jobs(["self", "native"], with_group=False)
          [World(size=1, backend=None), World(size=2, backend=None)]
        """
        if not with_group:
            return [World(size, None) for size in self.sizes]
        names = self.backends or tuple(backends)
        of_one = names if self.backends else tuple(n for n in names if n in ONE_RANK_BACKENDS) or names
        of_more = tuple(name for name in names if name not in ONE_RANK_BACKENDS)
        return [World(size, name) for size in self.sizes for name in (of_one if size == 1 else of_more)]


def parse(
    *sizes: Any, dies: Any = (), fresh: bool = False, timeout: Any = None, backends: Any = None
) -> Ranks:
    """Check the arguments of the mark.

    Raises:
      ValueError: naming the argument and what was given.

    Example:
      >>> parse(2, 3, dies={1}).alone
      True
    """
    if not sizes or not all(type(n) is int and n >= 1 for n in sizes):
        raise ValueError(f"ranks: sizes must be positive integers, as in ranks(2, 3), got {sizes!r}")
    if len(set(sizes)) != len(sizes):
        raise ValueError(f"ranks: sizes must differ, got {sizes!r}")
    dying = frozenset(dies)
    if not all(type(r) is int and 0 <= r < min(sizes) for r in dying):
        raise ValueError(f"ranks: dies must be ranks in [0, {min(sizes)}), got {dies!r}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"ranks: timeout must be a positive number of seconds, got {timeout!r}")
    names = None if backends is None else tuple(backends)
    return Ranks(tuple(sizes), dying, fresh, timeout, names)


def of(node: pytest.Item | Any) -> Ranks | None:
    """The checked `ranks` mark nearest to `node`, or None without one. A wrong one is an error of its file."""
    mark = node.get_closest_marker("ranks")
    if mark is None:
        return None
    try:
        return parse(*mark.args, **mark.kwargs)
    except (TypeError, ValueError) as error:
        text = str(error).replace("parse()", "ranks:")
        pytest.fail(f"{node.nodeid}: {text}", pytrace=False)

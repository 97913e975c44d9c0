"""`@pytest.mark.ranks(...)` and settings of the plugin: the jobs (size and backend) of a test, and how they start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from samestep.testing.world import WorldHolder

HOLDER: pytest.StashKey[WorldHolder] = pytest.StashKey()
EXPECTED_INI = "samestep_ranks_expected"
EXPECTED_NAME: pytest.StashKey[str] = pytest.StashKey()
"""Name of another ini option to read instead, for a suite that can be run at several lengths."""
TIMEOUT_INI = "samestep_ranks_timeout"
BACKENDS_INI = "samestep_backends"


def default_timeout(config: pytest.Config) -> float:
    """Seconds a test may take whose mark says nothing."""
    text = config.getini(TIMEOUT_INI)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise pytest.UsageError(f"{TIMEOUT_INI} must be a positive number of seconds, got {text!r}")
    return seconds


def expected(config: pytest.Config) -> dict[int, int]:
    """Number of tests promised for each number of ranks. An entry that is not `size:count` is a UsageError."""
    promised = {}
    name = config.stash.get(EXPECTED_NAME, EXPECTED_INI)
    for entry in config.getini(name):
        size, _, count = entry.partition(":")
        if not (size.isdigit() and count.isdigit()):
            raise pytest.UsageError(f"{name}: entries are size:count, as in 2:40, got {entry!r}")
        promised[int(size)] = int(count)
    return promised


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
        """The jobs to run in: every size on every backend that has it, or without the fixture `group` once.

        One rank is the same on every backend, so it runs only on `self` where `backends` has that.

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
    """Check the arguments of the mark. A ValueError names the argument and what was given.

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


WORLD = "_samestep_world"


def world_of(item: pytest.Item) -> World:
    """The world in which `item`, which has the mark, runs."""
    world: World = item.callspec.params[WORLD]  # type: ignore[attr-defined]
    return world


class Start(NamedTuple):
    """How the ranks of an item are started: how many, and whether by the launcher of an MPI library."""

    size: int
    mpi: bool


def start_of(item: pytest.Item) -> Start:
    """How to start the ranks of `item`, which has the mark. MPI is started only for jobs that use it.

    A test without `group` makes its own world. MPI starts its ranks if the mark, or else the ini
    option, names an MPI backend.
    """
    world, mark = world_of(item), of(item)
    names = [world.backend] if world.backend else (mark and mark.backends) or item.config.getini(BACKENDS_INI)
    return Start(world.size, world.size > 1 and any(name not in WITHOUT_MPI for name in names))

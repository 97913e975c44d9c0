"""The same number of steps on all ranks, even if some run out of batches first."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np

from samestep import _core
from samestep._util.json_layout import Many
from samestep._util.text import by_rank
from samestep.errors import InvalidArgumentError, MismatchError
from samestep.group.backend_argument import takes_backend
from samestep.group.group import Group
from samestep.group.work import Work

_B = TypeVar("_B")

_KEY_BITS = 20  # in the upper half of a flag: the loop and the step
_COUNT_BITS = 40
_loops: weakref.WeakKeyDictionary[Group, tuple[int, int]] = weakref.WeakKeyDictionary()


@takes_backend
def steps(
    backend: Group, batches: Iterable[_B], *, until: Literal["all", "any"] = "all"
) -> Iterator[_B | None]:
    """Iterate over this rank's batches, with the same number of steps on every rank. Collective in each step.

    A rank that has run out of batches gets None and takes part in the collectives of the step with weight 0.
    All ranks use the loop, and leave it after the same step. The next batch is taken before a step begins. While
    the step runs, a reduction of 8 bytes finds out whether other ranks have one.

    Args:
      backend: the group.
      batches: of this rank; any iterable, also one without a length.
      until: "all": until all ranks have run out. "any": until the first one has. The other ranks
        then have batches left, of which one has been taken from the iterator.

    Raises:
      InvalidArgumentError: another `until`.
      MismatchError: a rank has left the loop early and calls something else.

    Example:
      >>> import samestep as ss
      >>> backend = ss.initialize()
      >>> for batch in ss.steps(backend, [[1, 2], [3]]):
      ...     print(batch)
      [1, 2]
      [3]
    """
    if until not in ("all", "any"):
        raise InvalidArgumentError(f"steps: until must be 'all' or 'any', got {until!r}")
    return _steps(backend, iter(batches), until == "any", _new_loop(backend))


def _new_loop(backend: Group) -> tuple[int, int]:
    """An identity for the next loop of a group, the same on all ranks.

    They count anew after a block of together() that has ended by an exception, as some may have started a loop in it.
    """
    before = _loops.get(backend, (0, -1))
    loop = (backend._replaced, before[1] + 1 if before[0] == backend._replaced else 0)
    _loops[backend] = loop
    return loop


def _steps(
    backend: Group, batches: Iterator[_B], stop_at_first: bool, loop: tuple[int, int]
) -> Iterator[_B | None]:
    coming = _Coming(backend, batches, loop)
    while True:
        n_ranks = coming.n_ranks()
        if n_ranks == 0 or (stop_at_first and n_ranks < backend.size):
            return
        batch = coming.batch
        coming.fetch()
        try:
            yield batch
        except GeneratorExit:
            # Left early: the other ranks have, too, or they get an error in their next collective.
            coming.n_ranks()
            raise


class _Coming:
    """The batch of the next step, and how many ranks have one."""

    def __init__(self, backend: Group, batches: Iterator[Any], loop: tuple[int, int]) -> None:
        self.batch: Any = None
        self._backend, self._batches, self._loop = backend, batches, loop
        self._step = -1
        self._ended = False
        self.fetch()

    def fetch(self) -> None:
        """Take the next batch, and start to count the ranks that have one."""
        self.batch = None
        if not self._ended:
            try:
                self.batch = next(self._batches)
            except StopIteration:
                self._ended = True
        self._step += 1
        self._count()

    def _count(self) -> None:
        key = zlib.crc32(f"{self._loop} {self._step}".encode()) >> (32 - _KEY_BITS)
        self._expected = key * self._backend.size
        with _core.UserCall(self._act()):
            flag = np.array([(key << _COUNT_BITS) + (not self._ended)], np.int64)
            self._work: Work[Any] = self._backend.iallreduce(flag, "sum")
        self._replaced = self._backend._replaced

    def n_ranks(self) -> int:
        """How many ranks have a next batch."""
        if self._replaced != self._backend._replaced:  # a block of together() has ended by an exception
            self._count()
        flag = int(self._work.wait()[0])
        if flag >> _COUNT_BITS != self._expected:
            self._tell_places()
        return flag & ((1 << _COUNT_BITS) - 1)

    def _tell_places(self) -> NoReturn:
        """Raise an error that names each rank's loop and step. Collective: all ranks have seen that these differ."""
        with _core.UserCall(self._act()):
            everyone = self._backend._allgather_facts([*self._loop, self._step], Many(int))
        last = max((block, loop) for block, loop, _ in everyone)
        # The next loop has one number on all ranks again.
        _loops[self._backend] = max(last, _loops[self._backend])
        places = [f"before step {step} of loop {loop}" for _, loop, step in everyone]
        raise MismatchError(
            f"steps() in group {self._backend.name}: {by_rank(places)} (both counted from 0); has a rank left a loop "
            "early?"
        )

    def _act(self) -> str:
        return f"steps() before step {self._step}"

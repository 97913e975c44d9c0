"""In which order each rank visits the data."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from samestep.errors import InvalidArgumentError

if TYPE_CHECKING:
    from samestep.backend import Backend

Mode = Literal["exact", "pad", "drop"]


class DistributedSampler:
    """This rank's share of the indices of `data`, newly ordered each epoch; fits `DataLoader(sampler=)`.

    All ranks draw the same permutation from `seed` and epoch, without communication, and take turns: rank r
    visits places r, r + size, r + 2 size, ... Without `set_epoch` every pass is in the same order.

    Args:
      backend: the group that shares the data.
      data: the whole data, or anything with its length, or that length.
      shuffle: False for the order of the data.
      seed: >= 0, the same on all ranks.
      mode: what to do where the ranks do not divide the number of items. "exact": every item once, so that
        some ranks have one more. "pad": all as many as the longest, by visiting items again. "drop": all as
        many as the shortest, leaving items out (others in each epoch).

    Raises:
      InvalidArgumentError: a negative seed or length, or another mode.

    Example:
      >>> import samestep as ss
      >>> sampler = ss.DistributedSampler(ss.initialize(), range(4), seed=1)
      >>> sorted(sampler)
      [0, 1, 2, 3]
      >>> first = list(sampler)
      >>> sampler.set_epoch(1)
      >>> list(sampler) == first
      False
    """

    def __init__(
        self, backend: Backend, data: Sized | int, *, shuffle: bool = True, seed: int = 0, mode: Mode = "pad"
    ) -> None:
        self.rank, self.size = backend.rank, backend.size
        self.n_items = len(data) if isinstance(data, Sized) else operator.index(data)
        self.shuffle, self.seed, self.mode = bool(shuffle), operator.index(seed), mode
        if self.n_items < 0 or self.seed < 0:
            raise InvalidArgumentError(
                f"DistributedSampler: length and seed must be >= 0, got {self.n_items} and {self.seed}"
            )
        if mode not in ("exact", "pad", "drop"):
            raise InvalidArgumentError(
                f"DistributedSampler: mode must be 'exact', 'pad' or 'drop', got {mode!r}"
            )
        self.epoch = 0
        self._begin = 0  # items of this epoch that all ranks together had visited before the current pass
        self._taken = 0  # indices that this rank has handed out in the current pass
        self._finished = False

    def __len__(self) -> int:
        """How many indices the next pass gives this rank; after `load_state_dict`, those that are left."""
        n_left = self.n_items - self._next_begin()
        if self.mode == "exact":
            return max(0, -(-(n_left - self.rank) // self.size))
        return -(-n_left // self.size) if self.mode == "pad" else n_left // self.size

    def __iter__(self) -> Iterator[int]:
        length = len(self)
        self._begin, self._taken, self._finished = self._next_begin(), 0, False
        left = self.order()[self._begin :]
        for i in range(length):
            self._taken = i + 1
            yield int(left[(self.rank + i * self.size) % len(left)])
        self._finished = True

    def order(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The order in which all ranks together visit the items in this epoch."""
        if not self.shuffle:
            return np.arange(self.n_items)
        # RandomState: its streams are frozen, so that a run can be resumed with another version of NumPy.
        bits = np.random.MT19937(np.random.SeedSequence([self.seed, self.epoch]))
        return np.random.RandomState(bits).permutation(self.n_items)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation before each epoch, on all ranks. A loaded epoch goes on where it was."""
        if epoch != self.epoch or self._finished:
            self.epoch, self._begin, self._taken, self._finished = operator.index(epoch), 0, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks are, given that each has handed out as many indices as this one."""
        visited = min(self._begin + self._taken * self.size, self.n_items)
        return {"n_items": self.n_items, "seed": self.seed, "epoch": self.epoch, "visited": visited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, at any number of ranks: the next pass gives what is left of that epoch.

        Raises:
          InvalidArgumentError: the state is of data of another length.
        """
        if state["n_items"] != self.n_items:
            raise InvalidArgumentError(
                f"DistributedSampler: the state is of {state['n_items']} items, the data have {self.n_items}"
            )
        self.seed, self.epoch, self._begin = state["seed"], state["epoch"], state["visited"]
        self._taken, self._finished = 0, False

    def _next_begin(self) -> int:
        return 0 if self._finished else self._begin

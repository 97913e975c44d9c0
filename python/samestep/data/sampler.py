"""The order in which each rank visits the data."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Iterator, Sized
from typing import Any, Literal

import numpy as np

from samestep.data import rows
from samestep.errors import InvalidArgumentError
from samestep.group.group import Group
from samestep.step.shards import part_of, shards_of

_Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """A part of the items of a step, as `DistributedSampler.steps` yields it. `len` is its number of items."""

    index: int
    """Which shard of the step, from 0: what `Accumulator.add` takes."""
    items: np.ndarray[Any, np.dtype[np.int64]]
    """Indices into the data; none where the step has fewer items than shards."""
    seed: int
    """For dropout and augmentation, 0 <= seed < 2**63. It depends on the sampler's seed, epoch, step and shard."""

    def __len__(self) -> int:
        return len(self.items)


def _seed(entropy: list[int]) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


Mode = Literal["exact", "pad", "drop"]


@dataclasses.dataclass
class _Pass:
    start: int
    """Items of this epoch that all ranks together had visited before."""
    begun: bool = False
    taken: int = 0
    """Indices, or steps, that this rank has handed out."""
    finished: bool = False
    read_ahead: bool = False
    """Whether indices went to another process, so that the loop may be behind them."""


class _FirstIndex(int):
    """The first index of a pass, which notes that a loader pickles it: only loaders with workers do."""

    current: _Pass

    def __reduce__(self) -> tuple[Any, ...]:
        self.current.read_ahead = True
        return int, (int(self),)


class DistributedSampler:
    """This rank's share of the indices of `data`, shuffled anew in each epoch; usable as `DataLoader(sampler=)`.

    All ranks draw the same permutation from `seed` and epoch, without communication. Rank r
    visits positions r, r + size, r + 2 size, ... of it. Without `set_epoch` all passes have the same order; a warning
    says so once. That ranks agree on data and seed is compared, with the same backend, by the first step of a
    `DistributedOptimizer` or `ShardedOptimizer` of torch and the first `Accumulator.mean`.

    Args:
      backend: the group that shares the data.
      data: the whole data set, or any object of the same length, or the length. A dict or tuple holds columns, whose
        rows are counted, as in `DistributedDataContainer`. Required.
      shuffle: False for the order of the data.
      seed: >= 0, the same on all ranks.
      mode: what to do if the number of items is not a multiple of the number of ranks. "exact": every item once, so
        that some ranks have one more. "pad": every rank has as many as the longest one and repeats items. "drop":
        every rank has as many as the shortest one and omits items (different ones in each epoch).
        None: "pad", or "exact" with `batch_size`.
        With `batch_size`, the same for a last step of fewer items: keep it, fill it up with items from the
        beginning, or drop it.
      batch_size: items of one step over all ranks, > 0. Then iterate over `steps()`, not over the sampler.
      shards: number of parts of a step, > 0; see `Accumulator`. Required with `batch_size`, and only valid with it.

    Raises:
      TypeError: the backend or the data are missing.
      InvalidArgumentError: a negative seed or length, another mode, or only one of `batch_size` and `shards`; or data
        that `DistributedDataContainer` refuses.

    Example:
      >>> import samestep as ss
      >>> sampler = ss.DistributedSampler(ss.initialize(), range(4), seed=1)
      >>> first = list(sampler)
      >>> sorted(first)
      [0, 1, 2, 3]
      >>> sampler.set_epoch(1)
      >>> list(sampler) == first
      False
    """

    def __init__(
        self,
        backend: Group,
        data: Sized | int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        mode: Mode | None = None,
        batch_size: int | None = None,
        shards: int | None = None,
    ) -> None:
        rows.require_backend_and_data("DistributedSampler", backend, data)
        self.rank, self.size = backend.rank, backend.size
        self.n_items = _count(data)
        if mode is None:
            mode = "pad" if batch_size is None else "exact"
        self.shuffle, self.seed, self.mode = bool(shuffle), operator.index(seed), mode
        if self.n_items < 0 or self.seed < 0:
            raise InvalidArgumentError(
                f"DistributedSampler: length and seed must be >= 0, got {self.n_items} and {self.seed}"
            )
        if mode not in ("exact", "pad", "drop"):
            raise InvalidArgumentError(
                f"DistributedSampler: mode must be 'exact', 'pad' or 'drop', got {mode!r}"
            )
        if (batch_size is None) != (shards is None):
            raise InvalidArgumentError(
                "DistributedSampler: batch_size and shards are given together or not at all"
            )
        self.batch_size = None if batch_size is None else operator.index(batch_size)
        self.shards = None if shards is None else operator.index(shards)
        if any(number is not None and number < 1 for number in (self.batch_size, self.shards)):
            raise InvalidArgumentError(
                f"DistributedSampler: batch_size and shards must be >= 1, got {batch_size} and {shards}"
            )
        self.epoch = 0
        self._pass = _Pass(0)
        self._warned = self._followed = False
        self._known_order: tuple[list[Any], np.ndarray[Any, np.dtype[np.int64]]] | None = None
        if isinstance(backend, Group):  # and nothing else that has a rank and a size
            backend._follow(self, DistributedSampler._take_place)

    def __len__(self) -> int:
        """Number of indices of this rank in the next pass, or of steps with `batch_size`; after loading, those left."""
        n_left = max(0, self.n_items - self._next_start())
        if self.batch_size is not None:
            return n_left // self.batch_size if self.mode == "drop" else -(-n_left // self.batch_size)
        if self.mode == "exact":
            return max(0, -(-(n_left - self.rank) // self.size))
        return -(-n_left // self.size) if self.mode == "pad" else n_left // self.size

    def __iter__(self) -> Iterator[int]:
        if self.batch_size is not None:
            raise InvalidArgumentError(
                "DistributedSampler was given batch_size: iterate over sampler.steps(), not over the sampler"
            )
        return self._indices(len(self), self._begin())  # no generator itself: the pass begins here

    def _indices(self, length: int, current: _Pass) -> Iterator[int]:
        left = self.order()[current.start :]
        for i in range(length):
            current.taken = i + 1
            index = int(left[(self.rank + i * self.size) % len(left)])
            if i == 0:
                index = _FirstIndex(index)
                index.current = current
            yield index
        current.finished = True

    def steps(self) -> Iterator[list[Shard]]:
        """This rank's shards of each step of the epoch, or of its remaining steps; the same steps on all ranks.

        Every rank gets the same number of steps, even if it has no shards. The items and the seed of a shard do not
        depend on the number of ranks. `state_dict` counts a step from when it is yielded.

        Raises:
          InvalidArgumentError: there is no `batch_size`.

        Example:
          >>> import samestep as ss
          >>> sampler = ss.DistributedSampler(ss.initialize(), 5, batch_size=4, shards=2, shuffle=False)
          >>> [[shard.items.tolist() for shard in step] for step in sampler.steps()]
          [[[0, 1], [2, 3]], [[4], []]]
        """
        if self.batch_size is None or self.shards is None:
            raise InvalidArgumentError("DistributedSampler.steps: give batch_size and shards to the sampler")
        return self._steps(self.batch_size)

    def _steps(self, batch_size: int) -> Iterator[list[Shard]]:
        n_steps, current = len(self), self._begin()
        for start in range(current.start, current.start + n_steps * batch_size, batch_size):
            current.taken += 1
            yield self._step_from(start)
        current.finished = True

    def _has_step_from(self, start: int) -> bool:
        """Whether the epoch has a step that begins at the position `start`."""
        assert self.batch_size is not None
        return self.n_items - start >= (self.batch_size if self.mode == "drop" else 1)

    def _after_step(self, start: int) -> int:
        """The position after the step that begins at `start`."""
        assert self.batch_size is not None
        return min(start + self.batch_size, self.n_items)

    def _step_from(self, start: int, rank: int | None = None) -> list[Shard]:
        """The shards of the step that begins at the position `start` of the epoch, of this rank or another one.

        Shards are contiguous and differ in length by at most one, the longer ones first.
        """
        assert self.batch_size is not None
        assert self.shards is not None
        key = [self.seed, self.epoch, self.n_items, self.shuffle]
        if self._known_order is None or self._known_order[0] != key:
            self._known_order = key, self.order()
        order = self._known_order[1]
        items = order[start : start + self.batch_size]
        if self.mode == "pad":
            items = np.concatenate([items, np.resize(order, self.batch_size - len(items))])
        rank = self.rank if rank is None else rank
        return [
            Shard(index, items[run.start : run.stop], _seed([self.seed, self.epoch, start, index]))
            for index in shards_of(self.shards, rank, self.size)
            for run in [part_of(len(items), index, self.shards)]
        ]

    def order_text(self) -> str:
        """What decides on the order, for comparison with other ranks; "" before the first pass."""
        if not self._pass.begun and not self.epoch:
            return ""
        steps = "" if self.batch_size is None else f", batch_size={self.batch_size}, shards={self.shards}"
        return f"{self.n_items} items, seed={self.seed}, shuffle={self.shuffle}, mode={self.mode!r}{steps}"

    def _take_place(self, group: Group) -> None:
        """The ranks of the group have changed."""
        self.rank, self.size = group.rank, group.size

    def order(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The order in which all ranks together visit the items in this epoch."""
        if not self.shuffle:
            return np.arange(self.n_items)
        # RandomState: its streams are frozen, so that a run can be resumed with another version of NumPy.
        bits = np.random.MT19937(np.random.SeedSequence([self.seed, self.epoch]))
        return np.random.RandomState(bits).permutation(self.n_items)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation before each epoch, on all ranks. A loaded epoch continues where it was saved."""
        if epoch != self.epoch or self._pass.finished:
            self.epoch, self._pass = operator.index(epoch), _Pass(0)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """The position of all ranks, if the loop of each has received as many items as that of this one.

        Args:
          consumed: how many items of this pass (with `batch_size`: steps) the loop has received; None: as many as the
            sampler has handed out. A loader that reads ahead takes more than it has given to the loop. The sampler
            notices that of a `DataLoader` with workers over its indices, but not that of other loops, e.g. on a
            thread or over `steps`: give the number there.

        Raises:
          InvalidArgumentError: `consumed` is missing after a loader with workers has begun the pass, or is negative or
            more than were handed out. After the last batch, call `set_epoch` for the next epoch instead. torchdata's
            `StatefulDataLoader` follows the sampler: save the loader's state.

        Example:
          >>> import samestep as ss
          >>> sampler = ss.DistributedSampler(ss.initialize(), 10)
          >>> indices = list(sampler)                    # read ahead
          >>> sampler.state_dict(consumed=4)["visited"]
          4
        """
        current = self._pass
        # A loader that saves the sampler's state beside each batch begins before the first index. It must not be
        # refused: what it saves is the state at the time of that batch.
        self._followed |= current.begun and not current.taken
        if consumed is None:
            if current.read_ahead and not self._followed:
                raise InvalidArgumentError(
                    "DistributedSampler.state_dict: a loader with worker processes takes indices ahead of the loop; "
                    "pass consumed=, the number of items that this rank's loop has received in this pass (after the "
                    "last batch call set_epoch(epoch + 1) instead), or save the state of a torchdata StatefulDataLoader"
                )
            consumed = current.taken
        if not 0 <= operator.index(consumed) <= current.taken:
            raise InvalidArgumentError(
                f"DistributedSampler.state_dict: consumed={consumed}, but the sampler has handed out {current.taken} "
                f"{'items' if self.batch_size is None else 'steps'} in this pass"
            )
        visited = min(current.start + consumed * (self.batch_size or self.size), self.n_items)
        state: dict[str, Any] = {
            "n_items": self.n_items,
            "seed": self.seed,
            "epoch": self.epoch,
            "visited": visited,
            "shuffle": self.shuffle,
        }
        if self.batch_size is not None:
            state |= {"batch_size": self.batch_size, "shards": self.shards}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position, on any number of ranks: the next pass yields what remains of that epoch.

        Raises:
          InvalidArgumentError: the state is of data of another length, of another `batch_size` or `shards`, or from
            within an epoch with another `shuffle`.
        """
        if state["n_items"] != self.n_items:
            raise InvalidArgumentError(
                f"DistributedSampler: the state is of {state['n_items']} items, the data have {self.n_items}"
            )
        for name, mine in (("batch_size", self.batch_size), ("shards", self.shards)):
            if mine is not None and state.get(name, mine) != mine:
                raise InvalidArgumentError(
                    f"DistributedSampler: the state is of {name}={state[name]}, not {mine}"
                )
        if state.get("shuffle", self.shuffle) != self.shuffle and 0 < state["visited"] < self.n_items:
            raise InvalidArgumentError(
                f"DistributedSampler: the state is from within an epoch with shuffle={state['shuffle']}, not "
                f"{self.shuffle}: what remains of it is not what remains here"
            )
        self.seed, self.epoch, self._pass = state["seed"], state["epoch"], _Pass(state["visited"])

    def _next_start(self) -> int:
        return 0 if self._pass.finished else self._pass.start

    def _begin(self) -> _Pass:
        if self._pass.finished and self.shuffle and self.n_items > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"DistributedSampler: epoch {self.epoch} begins again, in the same order; call set_epoch(epoch) before "
                "each epoch, or pass shuffle=False",
                stacklevel=3,
            )
        self._pass = _Pass(self._next_start(), begun=True)
        return self._pass


def _count(data: Any) -> int:
    if isinstance(data, Sized):
        has_items = callable(getattr(type(data), "__getitem__", None))
        return rows.count(data, "DistributedSampler") if has_items else len(data)
    try:
        return operator.index(data)
    except TypeError:
        raise TypeError(
            f"DistributedSampler: {type(data).__name__} has no length; pass the number of items"
        ) from None

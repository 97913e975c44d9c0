"""Steps of a fixed number of items, split into shards independently of the ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

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


def shards_of_step(items: _Indices, n_shards: int, rank: int, size: int, entropy: list[int]) -> list[Shard]:
    """The shards of one step that `rank` works on.

    Args:
      items: of the step, in order. Shards are contiguous and differ in length by at most one, the longer ones first.
      n_shards: of the step.
      rank: of the group.
      size: of the group.
      entropy: whole numbers >= 0 that identify this step.

    Example:
      >>> [shard.items.tolist() for shard in shards_of_step(np.arange(5), 4, 0, 2, [1])]
      [[0, 1], [2]]
    """
    runs = ((index, part_of(len(items), index, n_shards)) for index in shards_of(n_shards, rank, size))
    return [Shard(index, items[run.start : run.stop], _seed([*entropy, index])) for index, run in runs]


def _seed(entropy: list[int]) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))

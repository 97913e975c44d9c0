"""Shards that a second rank computes again: a processor that computes wrongly is found, and named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep import _core, trees
from samestep._util.text import ranks_text
from samestep.errors import InvalidArgumentError, MismatchError
from samestep.group.group import Group
from samestep.step.shards import shards_of
from samestep.step.state_hash import hash_of
from samestep.trees.fusion import Timer

__all__ = ["Audited", "Differs", "choose", "compare", "digest", "with_another"]


class Audited(NamedTuple):
    """Shards of a step that are computed by several ranks."""

    step: int
    ranks: dict[int, tuple[int, ...]]
    """Of each of these shards: the first one adds it, the others compare."""


class Differs(MismatchError):
    """Ranks have computed different gradients of a shard. The same on all ranks."""

    __module__ = "samestep"
    shards: tuple[int, ...] = ()


def choose(rate: float, seed: int, step: int, n_shards: int, size: int) -> Audited | None:
    """What is audited in a step, if anything. Pure: the same on all ranks, and on any of the same number.

    One shard of each rank by the rank at some distance: all take longer by the same, and no one waits for others.

    Args:
      rate: of all shards, 0 to 1; at most one of each rank in a step.
      seed: >= 0.

    Example:
      >>> choose(1.0, 1, 7, 8, 3)
      Audited(step=7, ranks={1: (0, 1), 4: (1, 2), 7: (2, 0)})
      >>> choose(0.0, 1, 7, 8, 3), choose(1.0, 1, 7, 8, 1)
      (None, None)
    """
    longest = -(-n_shards // size)  # of the runs of shards that ranks have
    words = np.random.SeedSequence([seed, step, 2]).generate_state(3, np.uint64)
    draw, at, distance = (int(word) for word in words)
    if size == 1 or draw >= rate * longest * 2**64:
        return None
    at, distance = at % longest, 1 + distance % (size - 1)
    runs = [shards_of(n_shards, rank, size) for rank in range(size)]
    chosen = [(run[at], rank) for rank, run in enumerate(runs) if at < len(run)]
    return Audited(step, {shard: (rank, (rank + distance) % size) for shard, rank in chosen})


def with_another(audited: Audited, shards: Sequence[int], size: int) -> Audited | None:
    """Those of its shards that differed, with a rank that decides; None: there is no other."""
    ranks = {}
    for shard in shards:
        others = [rank for rank in range(size) if rank not in audited.ranks[shard]]
        if not others or len(audited.ranks[shard]) > 2:
            return None
        ranks[shard] = (*audited.ranks[shard], others[0])
    return Audited(audited.step, ranks)


def digest(grads: Any, weight: float) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """128 bits of the gradients of a shard; never all zero."""
    leaves = [weight, *trees.flatten(grads).leaves]
    whole = _core.hash128(np.frombuffer(b"\0".join(map(hash_of, leaves)), np.uint8))
    words: np.ndarray[Any, np.dtype[np.uint64]] = np.frombuffer(whole, np.uint64).copy()
    words[0] |= np.uint64(1)
    return words


def compare(
    backend: Group, audited: Audited, mine: dict[int, np.ndarray[Any, np.dtype[np.uint64]]], left: Timer
) -> None:
    """Compare what the ranks of `audited` have computed; `mine`: the digests of this rank, by shard. Collective.

    Raises:
      Differs: on all ranks, with the ranks and their hosts.
      InvalidArgumentError: on all ranks, if one has not added a shard.
    """
    places = [
        [shard for shard, ranks in audited.ranks.items() if rank in ranks] for rank in range(backend.size)
    ]
    words = np.zeros((max(map(len, places)), 2), np.uint64)
    for i, shard in enumerate(places[backend.rank]):
        words[i] = mine.get(shard, 0)
    table = backend.allgather(words, timeout=left())
    differing, texts = [], []
    for shard, ranks in audited.ranks.items():
        found = {rank: bytes(table[rank, places[rank].index(shard)]) for rank in ranks}
        if missing := [rank for rank in ranks if not any(found[rank])]:
            raise InvalidArgumentError(
                f"audit of {_name(backend, audited, shard)}: {ranks_text(sorted(missing))} did not add it; each shard "
                "that a step yields is added"
            )
        if len(set(found.values())) > 1:
            differing.append(shard)
            texts.append(f"audit of {_name(backend, audited, shard)}: {_difference(backend, found)}")
    if differing:
        error = Differs(f"{'; '.join(texts)}; the parameters have not been changed")
        error.shards = tuple(differing)
        raise error


def _name(backend: Group, audited: Audited, shard: int) -> str:
    return f"shard {shard} of step {audited.step} in group {backend.name}"


def _difference(backend: Group, found: dict[int, bytes]) -> str:
    """Who has computed something else. Pure."""
    names = {rank: f"rank {rank} ({backend._hosts[rank].partition('/')[0]})" for rank in found}
    value, count = Counter(found.values()).most_common(1)[0]
    if count == 1:
        return f"{' and '.join(names.values())} have computed different gradients"
    odd = next(rank for rank in found if found[rank] != value)
    others = ranks_text(sorted(rank for rank in found if rank != odd))
    return f"{names[odd]} has computed other gradients than {others}"

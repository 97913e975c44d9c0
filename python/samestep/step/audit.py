"""Shards that a second rank computes again: a processor that computes wrongly is found, and named."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from samestep import _core, arrays, trees
from samestep._util.text import ranks_text
from samestep.errors import InvalidArgumentError, MismatchError
from samestep.step.shards import shards_of
from samestep.step.state_hash import leaf_hash

if TYPE_CHECKING:
    from samestep.group.group import Group
    from samestep.trees.fusion import Timer

__all__ = ["Audited", "Differs", "choose", "compare", "digest", "with_another"]


class Audited(NamedTuple):
    """A shard that is computed by several ranks."""

    step: int
    shard: int
    ranks: tuple[int, ...]
    """The first one adds it, the others compare."""


class Differs(MismatchError):
    """Ranks have computed different gradients of one shard. The same on all ranks."""

    __module__ = "samestep"


def choose(rate: float, seed: int, step: int, n_shards: int, size: int) -> Audited | None:
    """What is audited in a step, if anything. Pure: the same on all ranks, and on any of the same number.

    Args:
      rate: of all shards, 0 to 1; at most one in a step.
      seed: >= 0.

    Example:
      >>> choose(1.0, 1, 7, 8, 3)
      Audited(step=7, shard=0, ranks=(0, 2))
      >>> choose(0.0, 1, 7, 8, 3), choose(1.0, 1, 7, 8, 1)
      (None, None)
    """
    draw = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, step, 2])))
    if size == 1 or draw.random_sample() >= rate * n_shards:
        return None
    shard = int(draw.randint(n_shards))
    owner = next(rank for rank in range(size) if shard in shards_of(n_shards, rank, size))
    return Audited(step, shard, (owner, int(owner + draw.randint(1, size)) % size))


def with_another(audited: Audited, size: int) -> Audited | None:
    """The same with a rank that decides; None: there is no other."""
    others = [rank for rank in range(size) if rank not in audited.ranks]
    return audited._replace(ranks=(*audited.ranks, others[0])) if others and len(audited.ranks) == 2 else None


def digest(grads: Any, weight: float) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """128 bits of the gradients of a shard; never all zero."""
    leaves = [weight, *trees.flatten(grads).leaves]
    hashes = [leaf_hash(leaf, arrays.info(leaf) if arrays.is_array(leaf) else None) for leaf in leaves]
    whole = _core.hash128(np.frombuffer(b"\0".join(hashes), np.uint8))
    words: np.ndarray[Any, np.dtype[np.uint64]] = np.frombuffer(whole, np.uint64).copy()
    words[0] |= np.uint64(1)
    return words


def compare(
    backend: Group, audited: Audited, mine: np.ndarray[Any, np.dtype[np.uint64]] | None, left: Timer
) -> None:
    """Compare what the ranks of `audited` have computed. Collective.

    Raises:
      Differs: on all ranks, with the ranks and their hosts.
      InvalidArgumentError: on all ranks, if one has not added the shard.
    """
    table = backend.allgather(np.zeros(2, np.uint64) if mine is None else mine, timeout=left())
    found = {rank: bytes(table[rank]) for rank in audited.ranks}
    what = f"shard {audited.shard} of step {audited.step} in group {backend.name}"
    if missing := [rank for rank in audited.ranks if not table[rank].any()]:
        raise InvalidArgumentError(
            f"audit of {what}: {ranks_text(missing)} did not add it; each shard that a step yields is added"
        )
    values = Counter(found.values())
    if len(values) == 1:
        return
    names = {rank: f"rank {rank} ({backend._hosts[rank].partition('/')[0]})" for rank in found}
    most = values.most_common(1)[0]
    if most[1] > 1:
        odd = [rank for rank, value in found.items() if value != most[0]]
        text = f"{names[odd[0]]} has computed other gradients than {ranks_text([r for r in found if r not in odd])}"
    else:
        text = f"{' and '.join(names.values())} have computed different gradients"
    raise Differs(f"audit of {what}: {text}; the parameters have not been changed")

"""Arrays of states that ranks divide, each with another part: what takes those of one rank for all refuses them."""

from __future__ import annotations

import weakref
from typing import Any

from samestep import arrays
from samestep.trees.structure import flatten

__all__ = ["note_part", "refusals"]

_parts: dict[int, weakref.ref[Any]] = {}
"""By the id of an array, as long as it exists."""
_WHY = (
    "a part of the state of a ShardedOptimizer, of which each rank holds another; exchange the whole: "
    "shard_state(opt, synchronize(backend, gather_state(opt, state, params)), params)"
)


def note_part(state: Any, of: Any = None, *, one: bool = False) -> Any:
    """Return `state`, this rank's part of one; what is an array of `of`, too, is no part. `one` notes a single leaf."""
    whole = set(map(id, flatten(of).leaves))
    for leaf in flatten(state).leaves:
        if arrays.is_array(leaf) and id(leaf) not in whole:
            _note(leaf, id(leaf))
            if one:
                break
    return state


def _note(leaf: Any, key: int) -> None:
    _parts[key] = weakref.ref(leaf, lambda _: _parts.pop(key, None))


def refusals(tree: Any) -> dict[int, str]:
    """Why no other rank's values may take the place of leaves of `tree`, by index."""
    if not _parts:
        return {}
    leaves = enumerate(flatten(tree).leaves)
    return {i: _WHY for i, leaf in leaves if (part := _parts.get(id(leaf))) is not None and part() is leaf}

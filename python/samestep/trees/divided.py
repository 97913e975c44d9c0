"""Arrays that ranks divide, each with another part of a whole: what takes those of one rank for all refuses them."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from samestep import arrays
from samestep._util.loaded import is_a
from samestep.trees.structure import flatten

__all__ = ["maker", "note_part", "refusals", "why_divided"]

_parts: dict[int, tuple[weakref.ref[Any], Any]] = {}
"""Of states of a `ShardedOptimizer`, by the id of an array, as long as it exists; with `by` of `note_part`."""
_OF_STATE = (
    "a part of the state of a ShardedOptimizer, of which each rank holds another; exchange the whole: "
    "shard_state(opt, synchronize(backend, gather_state(opt, state, params)), params); a TrainState needs copies=2"
)
_BY_TORCH = (
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed.fsdp", "FlatParameter"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
)


def note_part(state: Any, of: Any = None, *, one: bool = False, by: Any = None) -> Any:
    """Return `state`, this rank's part of one; what is an array of `of`, too, is no part.

    `one` notes a single leaf, `by` is what `maker` returns.
    """
    whole = set(map(id, flatten(of).leaves))
    for leaf in flatten(state).leaves:
        if arrays.is_array(leaf) and id(leaf) not in whole:
            _note(leaf, id(leaf), by)
            if one:
                break
    return state


def _note(leaf: Any, key: int, by: Any) -> None:
    _parts[key] = weakref.ref(leaf, lambda _: _parts.pop(key, None)), by


def maker(tree: Any) -> Any:
    """What `note_part` was told of a part in `tree`; None: nothing."""
    for leaf in flatten(tree).leaves if _parts else ():
        part, by = _parts.get(id(leaf), (None, None))
        if part is not None and part() is leaf and by is not None:
            return by
    return None


def why_divided(of: Any) -> str:
    """Why a tensor or module of torch is no whole; "" if it is one."""
    for module, name in _BY_TORCH:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(of, kind):
            return f"a {name}, of which each rank holds another part; torch itself exchanges parts and their gradients"
    return ""


def refusals(tree: Any) -> dict[int, str]:
    """Why no other rank's values may take the place of leaves of `tree`, by index."""
    if not _parts and not any(module in sys.modules for module, _ in _BY_TORCH):
        return {}
    found = {}
    for i, leaf in enumerate(flatten(tree).leaves):
        part, _ = _parts.get(id(leaf), (None, None))
        if why := _OF_STATE if part is not None and part() is leaf else why_divided(leaf):
            found[i] = why
    parameters = (p for group in getattr(tree, "param_groups", ()) for p in group["params"])
    within = tree.modules() if is_a(tree, "torch.nn", "Module") else parameters
    if why := next(filter(None, map(why_divided, within)), ""):
        found.setdefault(0, why)
    return found

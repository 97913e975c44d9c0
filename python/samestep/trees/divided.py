"""Arrays that ranks divide, each with another part of a whole: what takes those of one rank for all refuses them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Collection
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


def why_divided(of: Any, viewed: Collection[int] = ()) -> str:
    """Why a tensor or module of torch is no whole; "" if it is one. `viewed`: what `viewed_by_fsdp` has found."""
    if id(of) in viewed:
        return _why("parameter of FullyShardedDataParallel")
    for module, name in _BY_TORCH:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(of, kind):
            return _why(name)
    return ""


def _why(name: str) -> str:
    return (
        f"a {name}, of which each rank holds another part; torch itself exchanges parts and their gradients"
    )


def viewed_by_fsdp() -> set[int]:
    """The ids of the parameters of FSDP1's modules, of which only those without `use_orig_params` tell by their class.

    Of its modules torch keeps no list. They need its default group, without which nothing is searched.
    """
    dist = sys.modules.get("torch.distributed")
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if dist is None or kind is None or not dist.is_available() or not dist.is_initialized():
        return set()
    modules = [found for found in gc.get_objects() if issubclass(type(found), kind)]
    return {id(parameter) for module in modules for parameter in module.parameters()}


def refusals(tree: Any) -> dict[int, str]:
    """Why no other rank's values may take the place of leaves of `tree`, by index."""
    if not _parts and not any(module in sys.modules for module, _ in _BY_TORCH):
        return {}
    found, viewed = {}, viewed_by_fsdp()
    for i, leaf in enumerate(flatten(tree).leaves):
        part, _ = _parts.get(id(leaf), (None, None))
        if why := _OF_STATE if part is not None and part() is leaf else why_divided(leaf, viewed):
            found[i] = why
    parameters = (p for group in getattr(tree, "param_groups", ()) for p in group["params"])
    within = tree.modules() if is_a(tree, "torch.nn", "Module") else parameters
    if why := next(filter(None, (why_divided(one, viewed) for one in within)), ""):
        found.setdefault(0, why)
    return found

"""Arrays that ranks divide, each with another part of a whole: what takes those of one rank for all refuses them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from samestep import arrays
from samestep._util.loaded import is_a
from samestep.trees.structure import Flat, flatten

__all__ = ["maker", "note_form", "note_part", "parts_in", "refusals", "why_divided"]

_parts: dict[int, tuple[weakref.ref[Any], Any]] = {}
"""Of states of a `ShardedOptimizer`, by the id of an array, as long as it exists; with `by` of `note_part`."""
_Form = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of each leaf."""
_forms: weakref.WeakKeyDictionary[Any, dict[_Form, Any]] = weakref.WeakKeyDictionary()
"""Of states of optimizers that are alive, with `plan` of `note_form`: programs of JAX return new arrays, which
`_parts` does not have."""
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
    """Return `state`, this rank's part of one; what is an array of `of`, too, is no part, nor what has no dimensions.

    `one` notes a single leaf, `by` is what `maker` returns.
    """
    whole = set(map(id, flatten(of).leaves))
    found = [leaf for leaf in flatten(state).leaves if arrays.is_array(leaf) and id(leaf) not in whole]
    # Where `by` is told, something has to be known of a state without parts, too.
    parts = [leaf for leaf in found if getattr(leaf, "shape", ())] or (found if by else [])
    for leaf in parts[:1] if one else parts:
        _note(leaf, id(leaf), by)
    return state


def _note(leaf: Any, key: int, by: Any) -> None:
    _parts[key] = weakref.ref(leaf, lambda _: _parts.pop(key, None)), by


def note_form(by: Any, plan: Any, state: Any, like: Sequence[str]) -> None:
    """Know states of the form of this one, a part that `by` has made, as such; `like`: names of parameters.

    A tree that looks like the parameters has no form of its own.
    """
    flat = flatten(state)
    if flat.names not in (list(like), [""]) and any(getattr(leaf, "shape", ()) for leaf in flat.leaves):
        _forms.setdefault(by, {})[_form_of(flat)] = plan


def _form_of(flat: Flat) -> _Form:
    shapes = (getattr(leaf, "shape", ()) for leaf in flat.leaves)
    return tuple((name, shape) for name, shape in zip(flat.names, map(tuple, shapes), strict=True))


def _find_forms(flat: Flat) -> Iterator[tuple[range, Any, Any]]:
    """Leaves that have the form of a state, with `by` and `plan` of `note_form`."""
    leaves = _form_of(flat) if _forms else ()
    for by, forms in list(_forms.items()):
        for form, plan in forms.items():
            first, n = form[0], len(form)
            for i in range(len(leaves) - n + 1):
                if leaves[i][1] == first[1] and leaves[i][0].endswith(first[0]):
                    prefix = leaves[i][0].removesuffix(first[0])
                    if all(leaves[i + k] == (prefix + name, shape) for k, (name, shape) in enumerate(form)):
                        yield range(i, i + n), by, plan


def maker(tree: Any) -> Any:
    """What `note_part` was told of a part in `tree`, or `by` and `plan` of `note_form`, and None; None: nothing."""
    if not _parts and not _forms:
        return None
    flat = flatten(tree)
    if noted := [by for _, by in _noted_in(flat)]:
        return next(filter(None, noted), None)
    found = [(by, plan, None) for _, by, plan in _find_forms(flat)]
    return found[-1] if found and all(by.copies > 1 for by, *_ in found) else None


def _noted_in(flat: Flat) -> Iterator[tuple[int, Any]]:
    """Indices of leaves that `note_part` was told of, with `by`."""
    for i, leaf in enumerate(flat.leaves) if _parts else ():
        part, by = _parts.get(id(leaf), (None, None))
        if part is not None and part() is leaf:
            yield i, by


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


def viewed_by_fsdp(among: Iterable[Any]) -> set[int]:
    """The ids of the parameters of FSDP1's modules, of which only those without `use_orig_params` tell by their class.

    Of its modules torch keeps no list. They need its default group, without which nothing is searched, nor if there is
    no parameter `among` these objects.
    """
    dist = sys.modules.get("torch.distributed")
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if dist is None or kind is None or not dist.is_available() or not dist.is_initialized():
        return set()
    if not any(isinstance(one, sys.modules["torch"].nn.Parameter) for one in among):
        return set()
    modules = [found for found in gc.get_objects() if issubclass(type(found), kind)]
    return {id(parameter) for module in modules for parameter in module.parameters()}


def parts_in(tree: Any, flat: Flat | None = None) -> dict[int, str]:
    """Why leaves of `tree` are no whole states of optimizers, by index."""
    if not _parts and not _forms:
        return {}
    flat = flat or flatten(tree)
    found = {i: _OF_STATE for i, _ in _noted_in(flat)}
    for leaves, _, _ in _find_forms(flat):
        found |= {i: _OF_STATE for i in leaves if getattr(flat.leaves[i], "shape", ())}
    return found


def refusals(tree: Any) -> dict[int, str]:
    """Why no other rank's values may take the place of leaves of `tree`, by index."""
    if not _parts and not _forms and not any(module in sys.modules for module, _ in _BY_TORCH):
        return {}
    flat, groups = flatten(tree), getattr(tree, "param_groups", ())
    is_module = is_a(tree, "torch.nn", "Module")
    within = list(tree.modules() if is_module else (p for g in groups for p in g["params"]))
    viewed = viewed_by_fsdp([*flat.leaves, *within])
    found = {i: why for i, leaf in enumerate(flat.leaves) if (why := why_divided(leaf, viewed))}
    found |= parts_in(tree, flat)
    if why := next(filter(None, (why_divided(one, viewed) for one in within)), ""):
        found.setdefault(0, why)
    return found

"""Trees of arrays: their leaves, the names of the leaves, and how to rebuild the tree.

A node is a dict, list, tuple, named tuple, deque, dataclass, a torch `Module` or `Optimizer`, or anything
registered with JAX. All else is a leaf, None included, so that None on one rank can be distinguished
from an array on another. The order of leaves depends on names alone: dicts go by sorted key, except an `OrderedDict`.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep.trees.adapters import Node, expand_jax, expand_torch

_ATOMS = frozenset([type(None), bool, int, float, complex, str, bytes])


class Flat(NamedTuple):
    """A tree laid out flat. `rebuild` takes one value per leaf and returns a tree of the same containers."""

    names: list[str]
    leaves: list[Any]
    rebuild: Callable[[Iterable[Any]], Any]


def flatten(tree: Any) -> Flat:
    """List the leaves of `tree` with their names, as one would write them behind the tree.

    Containers are never changed: `rebuild` makes new ones of the same type with the same attributes (a
    `state_dict` keeps its `_metadata`). Only torch modules and optimizers are written to, and returned
    themselves.

    Example:
      >>> from samestep.trees import flatten
      >>> flat = flatten({"b": (1.0, None), "a": [2.0]})
      >>> flat.names
      ["['a'][0]", "['b'][0]", "['b'][1]"]
      >>> flat.rebuild([20.0, 10.0, None])
      {'b': (10.0, None), 'a': [20.0]}
    """
    names: list[str] = []
    leaves: list[Any] = []
    build = _visit(tree, "", names, leaves)
    return Flat(names, leaves, lambda values: build(iter(values)))


def is_plain(tree: Any) -> bool:
    """Whether its containers are dicts, lists and tuples only, of these very types."""
    if type(tree) is dict:
        return all(map(is_plain, tree.values()))
    if type(tree) in (list, tuple):
        return all(map(is_plain, tree))
    return _is_leaf(tree) or isinstance(tree, np.generic)


def _is_leaf(tree: Any) -> bool:
    return type(tree) in _ATOMS or hasattr(type(tree), "__dlpack__")


def _visit(tree: Any, name: str, names: list[str], leaves: list[Any]) -> Callable[[Iterator[Any]], Any]:
    node = None if _is_leaf(tree) else _open(tree)
    if node is None:
        names.append(name)
        leaves.append(tree)
        return next
    builds: list[Callable[[Iterator[Any]], Any]] = []
    for key, child in zip(node.names, node.children, strict=True):
        if type(child) is np.ndarray:  # most leaves are, and a call for each would be felt
            names.append(name + key)
            leaves.append(child)
            builds.append(next)
        else:
            builds.append(_visit(child, name + key, names, leaves))
    return lambda values: node.rebuild([build(values) for build in builds])


def _open(tree: Any) -> Node | None:
    if isinstance(tree, dict):
        keys = list(tree) if isinstance(tree, collections.OrderedDict) else _sorted_keys(tree)
        return Node(
            [f"[{key!r}]" for key in keys], [tree[key] for key in keys], lambda v: _with_items(tree, keys, v)
        )
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return Node([f".{field}" for field in tree._fields], tree, type(tree)._make)  # type: ignore[attr-defined]
    if isinstance(tree, tuple):
        return Node([f"[{i}]" for i in range(len(tree))], tree, type(tree))
    if isinstance(tree, (list, collections.deque)):
        return Node(
            [f"[{i}]" for i in range(len(tree))], tree, lambda v: _with_items(tree, range(len(tree)), v)
        )
    return expand_torch(tree) or expand_jax(tree) or _open_dataclass(tree)


def _open_dataclass(tree: Any) -> Node | None:
    if not dataclasses.is_dataclass(tree) or isinstance(tree, type):
        return None
    fields = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
    return Node(
        [f".{f}" for f in fields], [getattr(tree, f) for f in fields], lambda v: _with_fields(tree, fields, v)
    )


def _sorted_keys(mapping: Mapping[Any, Any]) -> list[Any]:
    try:
        return sorted(mapping)
    except TypeError:  # keys of several types, e.g. int and str
        return sorted(mapping, key=lambda key: (type(key).__name__, repr(key)))


def _with_items(container: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    new = copy.copy(container)  # the same type with the same attributes and the same order
    for key, value in zip(keys, values, strict=True):
        new[key] = value
    return new


def _with_fields(record: Any, fields: Sequence[str], values: Sequence[Any]) -> Any:
    new = copy.copy(record)
    for field, value in zip(fields, values, strict=True):
        object.__setattr__(new, field, value)  # frozen ones too
    return new

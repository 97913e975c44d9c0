"""Trees of arrays: their leaves, the names of the leaves, and how to rebuild the tree.

A node is a dict, list, tuple, named tuple, deque, dataclass, a class of attrs, a namespace, a torch `Module` or
`Optimizer`, anything registered with JAX, or any other mapping or sequence that a trial shows can be built again with
other values. All else is a leaf, None included, so that None on one rank can be distinguished from an array on another.
The order of leaves depends on names alone: mappings go by sorted key, except an `OrderedDict`.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep import _core
from samestep._util.loaded import is_a
from samestep.trees.identity import is_array, is_number, key_text, parts_of, passes

KEY_DATA = ".<random key>"
"""How the name of a leaf ends that is the data of a typed random key of JAX: no attribute has such a name."""


class Node(NamedTuple):
    """One opened container: `rebuild(children)` gives it back."""

    names: Sequence[str]
    children: Sequence[Any]
    rebuild: Callable[[list[Any]], Any]
    static: Any = None
    """What JAX keeps of the container beside its children, such as fields of an equinox module that are no arrays."""


def expand_jax(tree: Any) -> Node | None:
    """Open one level of anything JAX knows as a pytree node, and a typed random key into its data."""
    jax = sys.modules.get("jax")
    if jax is None:
        return None
    if isinstance(tree, jax.Array) and jax.dtypes.issubdtype(tree.dtype, jax.dtypes.prng_key):
        kind = jax.random.key_impl(tree)
        return Node(
            [KEY_DATA],
            [jax.random.key_data(tree)],
            lambda v: jax.random.wrap_key_data(v[0], impl=kind),
            str(kind),
        )
    if jax.tree_util.all_leaves([tree]):
        return None
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    _, static = structure.node_data()
    return Node(
        [jax.tree_util.keystr(path) for path, _ in pairs],
        [child for _, child in pairs],
        structure.unflatten,
        static,
    )


def expand_torch(tree: Any) -> Node | None:
    """Open a module into its parameters and buffers, and an optimizer into state and options."""
    if is_a(tree, "torch.nn", "Module"):
        named = [*tree.named_parameters(), *tree.named_buffers()]
        return Node([f".{name}" for name, _ in named], [tensor for _, tensor in named], lambda _: tree)
    return _open_optimizer(tree) if is_a(tree, "torch.optim", "Optimizer") else None


def _open_optimizer(optimizer: Any) -> Node:
    """State by parameter number as in `state_dict`, and the groups' options. Parameters are the model's."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {i: optimizer.state[p] for i, p in enumerate(parameters) if p in optimizer.state}
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]

    def write_back(values: list[Any]) -> Any:
        for i, new in values[0].items():
            optimizer.state[parameters[i]].update(new)
        for group, options in zip(optimizer.param_groups, values[1], strict=True):
            group.update(options)
        settings = getattr(optimizer, "_samestep_settings", None)
        if settings is not None:
            settings.forget()
        return optimizer

    return Node([".state", ".param_groups"], [state, groups], write_back)


ATOMS = frozenset([type(None), bool, int, float, complex, str, bytes])
_MAPPINGS = (dict, collections.UserDict)  # that `copy.copy` copies with their entries
_LISTS = (list, collections.deque, collections.UserList)
_USUAL = (dict, tuple, *_LISTS)
_NO_NODES = (str, bytes, bytearray, memoryview, range)
_BUILT_FOR_SURE = frozenset(
    [dict, list, tuple, collections.deque, collections.OrderedDict, collections.defaultdict]
)
_KEYS_IN_ORDER: tuple[set[type], ...] = (set(), {str}, {int})
DEEPEST = 200
"""Containers in containers. Deeper ones are leaves, as is one that holds itself."""

_missing = object()
_built_before: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes with fields of which one instance has been built again."""


class Flat(NamedTuple):
    """A tree laid out flat. `rebuild` takes one value per leaf and returns a tree of the same containers."""

    names: list[str]
    leaves: list[Any]
    rebuild: Callable[[Iterable[Any]], Any]
    static: Sequence[tuple[str, Any]] = ()
    """Names of containers of JAX, with what it keeps of them beside their leaves."""


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
    static: list[tuple[str, Any]] = []
    build = _visit(tree, "", names, leaves, static)
    if _core.memory_is_in_use():  # a result that is on its way into a leaf comes first
        _core.settle(list(filter(is_array, leaves)))
    return Flat(names, leaves, lambda values: build(iter(values)), static)


def is_plain(tree: Any) -> bool:
    """Whether its containers are dicts, lists and tuples only, of these very types."""
    if type(tree) is dict:
        return all(map(is_plain, tree.values()))
    if type(tree) in (list, tuple):
        return all(map(is_plain, tree))
    return _is_leaf(tree) or isinstance(tree, np.generic)


def _is_leaf(tree: Any) -> bool:
    return type(tree) in ATOMS or hasattr(type(tree), "__dlpack__")


def _visit(
    tree: Any,
    name: str,
    names: list[str],
    leaves: list[Any],
    static: list[tuple[str, Any]],
    *,
    depth: int = 0,
) -> Callable[[Iterator[Any]], Any]:
    node = None if _is_leaf(tree) or depth > DEEPEST else _open(tree)
    if node is None:
        names.append(name)
        leaves.append(tree)
        return next
    if node.static:
        static.append((name, node.static))
    builds: list[Callable[[Iterator[Any]], Any]] = []
    for key, child in zip(node.names, node.children, strict=True):
        if type(child) is np.ndarray:  # most leaves are, and a call for each would be felt
            names.append(name + key)
            leaves.append(child)
            builds.append(next)
        else:
            builds.append(_visit(child, name + key, names, leaves, static, depth=depth + 1))
    return lambda values: node.rebuild([build(values) for build in builds])


def _open(tree: Any) -> Node | None:
    if type(tree) is dict:  # without the ways below, which would be felt
        keys, names = _named_keys(tree)
        children = [tree[key] for key in keys]
        return None if names is None else Node(names, children, lambda v: _with_items(tree, keys, v))
    if isinstance(tree, _USUAL):
        usual = _open_items(tree)
        if usual is not None or type(tree) in _BUILT_FOR_SURE or hasattr(tree, "_fields"):
            return usual  # JAX would open a named tuple, and drop its attributes
    if (known := expand_torch(tree) or expand_jax(tree)) is not None:
        return known
    fields = fields_of(tree)
    if fields is None:
        return (
            None
            if not isinstance(tree, (Mapping, Sequence)) or isinstance(tree, _NO_NODES)
            else _open_items(tree)
        )
    children = [getattr(tree, f) for f in fields]
    node = Node([f".{f}" for f in fields], children, lambda v: _with_fields(tree, fields, v))
    if type(tree) not in _built_before:
        if not _is_rebuilt(tree, node):
            return None
        _built_before.add(type(tree))
    return node


def fields_of(tree: Any) -> list[str] | None:
    """The fields of a dataclass, a class of attrs or a namespace, and attributes of arrays; None for all else."""
    own = getattr(tree, "__dict__", {})
    if isinstance(tree, types.SimpleNamespace):
        return sorted(own)
    fields: Any = getattr(type(tree), "__attrs_attrs__", None)
    if dataclasses.is_dataclass(type(tree)):
        fields = dataclasses.fields(tree)
    if fields is None:
        return None
    names = [field.name for field in fields if hasattr(tree, field.name)]
    if len(own) > len(names):
        names += sorted(name for name in own.keys() - set(names) if _hidden_in(own[name]))
    return names


def _hidden_in(value: Any) -> list[Any]:
    """What in the value of an attribute is or may hold an array."""
    return [part for part in parts_of(value) if not (passes(part) or is_number(part))]


def _open_items(tree: Any) -> Node | None:
    """Open a mapping or sequence in the first way of building it that a trial shows to be right."""
    try:
        for node in _ways_to_build(tree):
            if type(tree) in _BUILT_FOR_SURE or _is_rebuilt(tree, node):
                return node
    except Exception:  # of an entry that cannot be read; an error here would leave the other ranks waiting
        return None
    return None


def _ways_to_build(tree: Any) -> Iterator[Node]:
    if isinstance(tree, (dict, Mapping)):
        keys, names = _named_keys(tree)
        if names is None:
            return
        children = [tree[key] for key in keys]
        if isinstance(tree, _MAPPINGS):
            yield Node(names, children, lambda v: _with_items(tree, keys, v))
        yield Node(names, children, lambda v: type(tree)(dict(zip(keys, v, strict=True))))  # type: ignore[call-arg]
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        fields = [f".{field}" for field in tree._fields]
        yield Node(fields, tree, lambda v: _with_attributes_of(tree, type(tree)._make(v)))  # type: ignore[attr-defined]
    else:
        names = [f"[{i}]" for i in range(len(tree))]
        if isinstance(tree, _LISTS):
            yield Node(names, tree, lambda v: _with_items(tree, range(len(tree)), v))
        yield Node(names, tree, type(tree))
        if isinstance(tree, tuple):  # a class with other arguments
            yield Node(names, tree, lambda v: _with_attributes_of(tree, tuple.__new__(type(tree), v)))


def _is_rebuilt(tree: Any, node: Node) -> bool:
    """Whether building `tree` from its own children gives another object of the same class, children and attributes."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields") and not hasattr(tree, "__dict__"):
        return True  # the usual named tuple, which has nothing else
    try:
        new = node.rebuild(list(node.children))
        if type(new) is not type(tree) or (new is tree and node.names):
            return False
        if isinstance(tree, (dict, Mapping)):
            again = [new[key] for key in _named_keys(tree)[0]] if len(new) == len(tree) else []
        else:
            fields = fields_of(tree)
            again = list(new) if fields is None else [getattr(new, field) for field in fields]
    except Exception:
        return False
    is_same = len(again) == len(node.names) and all(a is b for a, b in zip(again, node.children, strict=True))
    return is_same and _attributes_are_kept(tree, new, node)


def _attributes_are_kept(tree: Any, new: Any, node: Node) -> bool:
    """Whether attributes are as they were, and show other children when `tree` is built again with these."""
    old, kept = _attributes_of(tree), _attributes_of(new)
    children = {id(child) for child in node.children}
    for name, value in old.items():
        now = kept.get(name, _missing)
        if value is not now and (type(value) is not type(now) or (type(value) in ATOMS and value != now)):
            return False
        hidden = _hidden_in(value)
        if not all(id(part) in children for part in hidden):
            return False
        if hidden and hidden[0] is not value and value is now:
            return False  # a container that both share
    keys = tree if isinstance(tree, Mapping) else {}
    names = [
        name
        for name, value in old.items()
        if (keys[name] is value if name in keys else id(value) in children and type(value) not in ATOMS)
    ]
    return not names or _attributes_follow(old, names, node)


def _attributes_follow(old: Mapping[str, Any], names: Sequence[str], node: Node) -> bool:
    """Whether attributes that are children themselves become the others with which the container is built again."""
    others = [object() for _ in node.children]
    try:
        shown = _attributes_of(node.rebuild(others))
    except Exception:
        return False
    return all(
        any(
            shown.get(name) is other
            for child, other in zip(node.children, others, strict=True)
            if child is old[name]
        )
        for name in names
    )


def _attributes_of(tree: Any) -> dict[str, Any]:
    """Attributes of an object, those in slots too, but not the fields of a record."""
    try:
        state = object.__reduce_ex__(tree, 2)[2]
    except Exception:  # an object that cannot be copied
        state = None
    found = dict(getattr(tree, "__dict__", {}))
    for part in state if isinstance(state, tuple) else (state,):
        found |= part if isinstance(part, dict) else {}
    for field in fields_of(tree) or ():
        found.pop(field, None)
    return found


def _named_keys(mapping: Mapping[Any, Any]) -> tuple[list[Any], list[str] | None]:
    """The keys in an order that depends on names alone, and these; None if keys have no names, or one name."""
    keys, in_order = list(mapping), isinstance(mapping, collections.OrderedDict)
    if set(map(type, keys)) in _KEYS_IN_ORDER:
        if not in_order:
            keys.sort()
        return keys, [f"[{key!r}]" for key in keys]
    texts = [key_text(key) for key in keys]
    named = [
        (type(key).__name__, text, key) for key, text in zip(keys, texts, strict=True) if text is not None
    ]
    if len(named) < len(keys) or len(set(texts)) < len(keys):
        return keys, None
    if not in_order:
        named.sort(key=lambda entry: entry[:2])
    return [key for *_, key in named], [f"[{text}]" for _, text, _ in named]


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


def _with_attributes_of(old: Any, new: Any) -> Any:
    if hasattr(old, "__dict__"):
        new.__dict__.update(old.__dict__)
    return new

"""Objects that are neither arrays nor numbers: which may pass through a reduction, and which ranks can compare."""

from __future__ import annotations

import collections
import enum
import functools
import numbers
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from samestep import arrays
from samestep.errors import InvalidArgumentError

_NO_NUMBERS = (str, bytes, enum.Enum, type, types.ModuleType, np.dtype, os.PathLike, range, slice)
_OF_TORCH = ("dtype", "device", "layout", "memory_format")
_TEXT_ARRAYS = "SUT"
_EXACT = (bool, int, float, complex, str, bytes, range)  # classes whose `repr` is exact
# More of them, by module and name: to import the modules would take time.
_EXACT_BY_NAME = {
    *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
    *(("torch", name) for name in _OF_TORCH),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    ("uuid", "UUID"),
}
_BRACKETS: dict[type, Sequence[str]] = {
    tuple: "()",
    list: "[]",
    set: ("set({", "})"),
    frozenset: ("frozenset({", "})"),
}
_GROUPS = (list, tuple, set, frozenset, collections.deque, collections.UserList)
_LONGEST_DECIMAL = 10_000  # bits; Python refuses to write longer numbers in decimal


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array itself, not an object that passes on the attributes of one that it holds."""
    return arrays.is_array(leaf) and (hasattr(type(leaf), "__dlpack__") or not hasattr(leaf, "__dlpack__"))


def is_flag(leaf: Any) -> bool:
    """A bool of Python or NumPy."""
    return isinstance(leaf, (bool, np.bool_))


def is_number(leaf: Any) -> bool:
    """A Python number, or a NumPy scalar that is not a text."""
    if isinstance(leaf, np.generic):
        return not isinstance(leaf, (np.flexible, np.object_))
    return isinstance(leaf, numbers.Number)


def passes(leaf: Any) -> bool:
    """Whether a reduction may return `leaf` as it is: nobody can have meant a gradient. The table of all such objects.

    Texts, flags, None, members of enumerations, classes, modules, functions, types of elements, paths, ranges, slices.

    Example:
      >>> [passes(x) for x in ("relu", None, True, np.tanh, np.dtype("f4"))]
      [True, True, True, True, True]
      >>> passes({1.0}), passes(2**70), passes(object())
      (False, False, False)
    """
    if (
        leaf is None
        or leaf is ...
        or leaf is NotImplemented
        or is_flag(leaf)
        or isinstance(leaf, _NO_NUMBERS)
        or arrays.is_float0(leaf)
    ):
        return True
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.char in _TEXT_ARRAYS
    if isinstance(leaf, functools.partial):
        return all(
            passes(part) or is_number(part) for part in (leaf.func, *leaf.args, *leaf.keywords.values())
        )
    if isinstance(leaf, types.MethodType) or _name_of_callable(leaf) is not None:
        return True
    return type(leaf).__module__ == "torch" and type(leaf).__name__ in _OF_TORCH


def identity_of(leaf: Any) -> str | None:
    """A text that is equal on two ranks if `leaf` means the same on both; None if that cannot be known.

    Example:
      >>> identity_of(np.linalg.norm), identity_of("sum"), identity_of(object())
      ('numpy.linalg.norm', "'sum'", None)
    """
    try:
        return _identity_of(leaf)
    except RecursionError:  # a list in itself
        return None


def _identity_of(leaf: Any) -> str | None:
    if leaf is None or leaf is ... or leaf is NotImplemented:
        return repr(leaf)
    if isinstance(leaf, enum.Enum):
        return f"{type(leaf).__qualname__}.{leaf.name if leaf.name else leaf.value}"
    if arrays.is_float0(leaf):
        return f"float0 {leaf.shape}"
    if isinstance(leaf, (np.ndarray, np.generic)):
        return _identity_in_numpy(leaf)
    return _identity_of_value(leaf) or _identity_of_parts(leaf) or _identity_of_callable(leaf)


def _identity_in_numpy(leaf: Any) -> str | None:
    """Of a scalar, or of an array whose elements cannot be sent; these may be any objects."""
    if not isinstance(leaf, (np.ndarray, np.void)):
        return f"{leaf.dtype} {leaf!r}"
    elements = identity_of(leaf.tolist())
    return elements and f"{leaf.dtype} {leaf.shape} {elements}"


def _identity_of_value(leaf: Any) -> str | None:
    """Of what has no parts."""
    kind = type(leaf)
    if kind is int and leaf.bit_length() > _LONGEST_DECIMAL:
        return hex(leaf)
    is_exact = kind in _EXACT or (kind.__module__, kind.__qualname__) in _EXACT_BY_NAME
    if is_exact or isinstance(leaf, np.dtype):
        return repr(leaf)
    if isinstance(leaf, (str, bytes)):
        return f"{kind.__qualname__} {leaf!r}"
    if isinstance(leaf, types.ModuleType):
        return leaf.__name__
    return f"{kind.__qualname__}({os.fspath(leaf)!r})" if isinstance(leaf, os.PathLike) else None


def _identity_of_parts(leaf: Any) -> str | None:
    """Of containers and the like: as they are written, sets in a common order."""
    if isinstance(leaf, functools.partial):
        return _behind("partial", (leaf.func, leaf.args, *sorted(leaf.keywords.items())))
    if type(leaf) is slice:
        return _behind("slice", (leaf.start, leaf.stop, leaf.step))
    if type(leaf) not in _BRACKETS:
        return None
    parts = [identity_of(part) for part in leaf]
    known = [part for part in parts if part is not None]
    if type(leaf) in (set, frozenset):
        known.sort()
    comma = "," * (type(leaf) is tuple and len(known) == 1)
    first, last = _BRACKETS[type(leaf)]
    return f"{first}{', '.join(known)}{comma}{last}" if len(known) == len(parts) else None


def _behind(name: str, parts: tuple[Any, ...]) -> str | None:
    inner = identity_of(parts)
    return inner and f"{name}{inner}"


def _identity_of_callable(leaf: Any) -> str | None:
    """Its name; of a function also what it has captured, and the defaults of its arguments."""
    name = _name_of_callable(leaf)
    if name is None or not isinstance(leaf, types.FunctionType):
        return name
    try:
        captured = tuple(cell.cell_contents for cell in leaf.__closure__ or ())
    except ValueError:  # one that is still empty
        return None
    parts = captured, leaf.__defaults__, tuple(sorted((leaf.__kwdefaults__ or {}).items()))
    return name if parts == ((), None, ()) else _behind(name, parts)


def _name_of_callable(leaf: Any) -> str | None:
    """Of a function or class; None if it has a state of its own, as a layer that is called like a function has."""
    name = getattr(leaf, "__qualname__", getattr(leaf, "__name__", None))
    if not callable(leaf) or not name:
        return None
    owner = getattr(leaf, "__self__", None)
    has_state = owner is not None and not isinstance(owner, (types.ModuleType, type))
    attributes = {} if isinstance(leaf, type) else getattr(leaf, "__dict__", {})
    if has_state or any(map(is_array, parts_of(attributes))):
        return None
    return f"{getattr(leaf, '__module__', None)}.{name}"


def parts_of(value: Any, depth: int = 20) -> Iterator[Any]:
    """What mappings, lists, tuples and sets hold, and what lies in these.

    Example:
      >>> list(parts_of({"a": [1, (2,)]}))
      [1, 2]
    """
    inner = value.values() if isinstance(value, (Mapping, types.MappingProxyType)) else value
    if depth and (inner is not value or isinstance(value, _GROUPS)):
        for part in inner:
            yield from parts_of(part, depth - 1)
    else:
        yield value


def key_text(key: Any) -> str | None:
    """How names of leaves spell the key of a mapping, the same on all ranks; None if that cannot be known.

    Example:
      >>> key_text(("w", 1)), key_text(frozenset("ba"))
      ("('w', 1)", "frozenset({'a', 'b'})")
    """
    text, has_repr = identity_of(key), type(key).__repr__ is not object.__repr__  # type: ignore[comparison-overlap]
    return repr(key) if text is None and has_repr else text


def attributes_text(leaf: np.ndarray[Any, Any]) -> str:
    """What the class of an array adds to its elements, such as a unit, which must be the same on all ranks."""
    attributes = {} if isinstance(leaf, np.memmap) else getattr(leaf, "__dict__", {})
    texts = []
    for name, value in sorted(attributes.items()):
        text = key_text(value)
        if text is None:
            raise InvalidArgumentError(
                f"a {type(leaf).__name__}, whose attribute {name!r} ranks cannot compare; pass np.asarray(x)"
            )
        texts.append(f"{name} {text}")
    return f" of class {type(leaf).__name__} with {', '.join(texts)}" if texts else ""

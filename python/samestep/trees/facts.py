"""What must be equal on all ranks beside the tree of a call, and is compared in the message that compares the trees."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep import _core, arrays
from samestep._util.dtypes import numpy_dtype
from samestep._util.text import by_rank
from samestep.errors import InvalidArgumentError, MismatchError
from samestep.group import compiled
from samestep.trees.identity import identity_of, is_array, is_number
from samestep.trees.structure import ATOMS, Flat, expand_jax, flatten

_MOST_WHOLE = 16  # elements of an array of whole numbers, such as counters and random keys
_REFUSED = "refused on rank "
PLAIN = (str, bool, type(None))
_WHOLE = (f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_DTYPES = frozenset(["bool", *_WHOLE, "float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
"""Of arrays that compiled programs pass."""


class Facts(NamedTuple):
    """Names and values; those that JAX traces have their values when the program runs."""

    texts: tuple[tuple[str, str], ...] = ()
    """Names, and what ranks compare."""
    traced: tuple[tuple[str, Any], ...] = ()
    cure: str = ""
    """The end of the error."""

    def with_texts(self, more: Sequence[tuple[str, str]]) -> Facts:
        """These and more."""
        return self._replace(texts=(*self.texts, *more)) if more else self

    def with_values(self, values: Sequence[np.ndarray[Any, Any]]) -> Facts:
        """These with the values that what JAX traces has in a run of the program."""
        names = (name for name, _ in self.traced)
        return self.with_texts(list(zip(names, map(_elements_text, values), strict=True)))._replace(traced=())


NO_FACTS = Facts()


def numbers_in(tree: Any, prefix: str, cure: str, *, of_parts: bool = False) -> Facts:
    """The numbers of a tree that should be one on all ranks: not its large arrays, which would take time.

    Numbers, texts and flags, arrays without dimensions, and short arrays of whole numbers, such as random keys, unless
    the tree is `of_parts` that differ.

    Example:
      >>> numbers_in({"count": np.int32(3), "mu": np.zeros(2)}, "state", "").texts
      (("state['count']", '3'),)
    """
    flat = flatten(tree)
    texts, traced = static_texts(flat, prefix), []
    for name, leaf in zip(flat.names, flat.leaves, strict=True):
        shape = getattr(leaf, "shape", ())
        if shape and isinstance(shape, tuple) and (of_parts or math.prod(shape) > _MOST_WHOLE):
            continue  # most leaves, which should cost little
        if (key := expand_jax(leaf) if compiled.is_traced([leaf]) else None) is not None:
            leaf = key.children[0]  # noqa: PLW2901 (the data of a random key)
        if not _is_compared(leaf):
            continue
        if compiled.is_traced([leaf]):
            if str(leaf.dtype) in _DTYPES:
                traced.append((prefix + name, leaf))
        elif (text := text_of(leaf)) is not None:
            texts.append((prefix + name, text))
    return Facts(tuple(texts), tuple(traced), cure)


def static_texts(flat: Flat, prefix: str = "") -> list[tuple[str, str]]:
    """What JAX keeps of the containers of a tree beside their leaves, as far as it means the same in every process."""
    return [
        (f"static data of {prefix + name or 'the top'}", _known_text(static)) for name, static in flat.static
    ]


def refused_texts(flat: Flat, refusals: Mapping[int, str], rank: int) -> list[tuple[str, str]]:
    """Facts that are equal nowhere, for a program in which `rank` refuses leaves: all ranks then raise when it runs."""
    return [(f"leaf {flat.names[i]}", f"{_REFUSED}{rank}: {why}") for i, why in sorted(refusals.items())[:1]]


def _known_text(value: Any, depth: int = 10) -> str:
    kind = type(value)
    if kind in ATOMS:
        return repr(value)
    if isinstance(value, (tuple, list)) and depth:
        return f"{kind.__name__}({', '.join([_known_text(part, depth - 1) for part in value])})"
    if isinstance(value, Mapping) and depth:
        items = [f"{_known_text(key, 0)}: {_known_text(part, depth - 1)}" for key, part in value.items()]
        return f"{kind.__name__}({', '.join(sorted(items))})"
    if dataclasses.is_dataclass(kind) and depth:
        fields = [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
        return f"{kind.__name__}({', '.join(f'{name}={_known_text(x, depth - 1)}' for name, x in fields)})"
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return f"{value.dtype} {value.shape} {_core.hash128(np.ascontiguousarray(value)).hex()}"
    return identity_of(value) or f"a {kind.__name__}"


def _is_compared(leaf: Any) -> bool:
    shape = getattr(leaf, "shape", None)
    if not isinstance(shape, tuple) or isinstance(leaf, np.generic):
        return isinstance(leaf, PLAIN) or is_number(leaf)
    if (not is_array(leaf) and not arrays.is_jax(leaf)) or arrays.is_float0(leaf):
        return False
    if not shape:
        return True
    kind = str(leaf.dtype).rpartition(".")[2]  # torch writes torch.int64
    return kind.startswith(("int", "uint", "bool")) and 0 not in shape


def text_of(leaf: Any) -> str | None:
    """What ranks compare of a number, text or array; None if its elements are out of reach."""
    if isinstance(leaf, PLAIN):
        return repr(leaf)
    try:
        return _elements_text(np.asarray(leaf))
    except Exception:  # on a device that NumPy does not reach, or on several, or donated to a program
        return None


def _elements_text(elements: np.ndarray[Any, Any]) -> str:
    return repr(elements.tolist())


def text_of_bytes(data: bytes, dtype: str, shape: tuple[int, ...]) -> str:
    """What `numbers_in` writes of an array, given its elements."""
    return _elements_text(np.frombuffer(data, numpy_dtype(dtype)).reshape(shape))


def check(where: str, everyone: Sequence[Mapping[str, str]], cure: str) -> None:
    """Raise MismatchError, the same on every rank, for the first name whose texts differ between ranks; or
    InvalidArgumentError for what a rank refuses.
    """
    for name in dict.fromkeys(name for mine in everyone for name in mine):
        texts = [mine.get(name, "missing") for mine in everyone]
        if refused := [text for text in texts if text.startswith(_REFUSED)]:
            raise InvalidArgumentError(f"{where}: {name} on rank {refused[0].removeprefix(_REFUSED)}")
        if len(set(texts)) > 1:
            raise MismatchError(f"{where}: {name} is {by_rank(texts)}; it must be equal on all ranks{cure}")

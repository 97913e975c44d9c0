"""What must be equal on all ranks, or parameters drift apart: numbers of an optimizer's state, and its settings.

Learning rates of `optax.inject_hyperparams`, counts that schedules go by, random keys; and the numbers that functions
of optax have captured, such as the learning rate of `optax.sgd(0.1)`.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from samestep import arrays
from samestep.group import compiled
from samestep.step.state_hash import leaf_hash
from samestep.trees import flatten
from samestep.trees.facts import Facts, numbers_in, text_of
from samestep.trees.identity import is_array, is_number

_CURE = (
    ", or parameters drift apart: make the optimizer alike, and its state by synchronize(backend, state) where some "
    "ranks alone have loaded or set it"
)
_LIBRARY = "optax"
_PLAIN = (str, bool, type(None))
_DEEPEST = 20


class StateFacts:
    """Those of one optimizer.

    Args:
      opt: with `init` and `update`.
    """

    def __init__(self, opt: Any) -> None:
        self._settings = [(f"the optimizer's {name}", text) for name, text in settings_of(opt.update).items()]

    def of(self, state: Any, *, of_parts: bool = False) -> Facts:
        """Of the optimizer and a state, whose arrays are all or `of_parts` that ranks divide."""
        return numbers_in(state, "state", _CURE, of_parts=of_parts).with_texts(self._settings)


def with_bits(facts: Facts, tree: Any, what: str) -> Facts:
    """`facts`, and what tells arrays from others: a hash, or where JAX traces the sum of their bits."""
    flat = flatten(tree)
    texts, traced = [], []
    for name, leaf in zip(flat.names, flat.leaves, strict=True):
        if compiled.is_traced([leaf]):
            traced.append((f"{what} {name}", _sum_of_bits(leaf)))
        elif is_array(leaf):
            texts.append((f"{what} {name}", f"an array of hash {leaf_hash(leaf, arrays.info(leaf)).hex()}"))
        else:
            texts.append((f"{what} {name}", repr(leaf) if is_number(leaf) else type(leaf).__name__))
    return facts.with_texts(texts)._replace(traced=(*facts.traced, *traced))


def _sum_of_bits(x: Any) -> Any:
    from jax import lax
    from jax import numpy as jnp

    if x.dtype.kind == "c":
        x = jnp.stack([x.real, x.imag])
    x = x.astype("uint8") if x.dtype == bool else x
    return lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}").sum(dtype="uint32")


def settings_of(update: Any) -> dict[str, str]:
    """Names of optax's functions, and numbers, texts and flags that they have captured, by where.

    Of other functions nothing, as what they hold may mean something else on each rank.
    """
    return dict(_captured(update, "", _DEEPEST))


def _captured(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, _PLAIN) or is_number(value) or (is_array(value) and not np.shape(value)):
        if (text := text_of(value)) is not None:
            yield path, text
        return
    if _is_of_library(value):
        yield path or "update", value.__qualname__
    for name, part in _parts_of(value) if depth else ():
        yield from _captured(part, (path + name).removeprefix("."), depth - 1)


def _is_of_library(value: Any) -> bool:
    is_function = isinstance(value, types.FunctionType)
    return is_function and (value.__module__ or "").partition(".")[0] == _LIBRARY


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield "", (value.func, value.args, value.keywords)
    elif _is_of_library(value):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # of a cell that is still empty
                yield f".{name}", cell.cell_contents
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())

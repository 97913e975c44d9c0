"""Collectives inside programs compiled by JAX: a call back to the host, in the order written."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from samestep.backend import Backend

_groups: weakref.WeakKeyDictionary[Backend, Backend] = weakref.WeakKeyDictionary()


def is_traced(leaves: Sequence[Any]) -> bool:
    """Whether a leaf is only a stand-in for an array, because JAX is tracing the caller."""
    jax = sys.modules.get("jax")
    return jax is not None and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def group_of(backend: Backend) -> Backend:
    """The group that compiled programs use: all ranks of `backend`, apart from it.

    JAX runs a program while Python goes on, so its messages would otherwise meet the caller's in an order
    that differs from rank to rank. Made when the first program is traced, collectively: all ranks trace the
    same one.
    """
    if backend not in _groups:
        group = backend.split(0, backend.rank)
        assert group is not None
        _groups[backend] = group
    return _groups[backend]


def call(function: Callable[..., Sequence[Any]], leaves: Sequence[Any]) -> list[Any]:
    """Have the compiled program call `function` with writable NumPy arrays of the leaves' values.

    It returns arrays of the same shapes and dtypes. Calls are made in the order in which they were traced.
    """
    import jax
    from jax.experimental import io_callback

    leaves = [jax.numpy.asarray(leaf) for leaf in leaves]
    results = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def on_host(*values: Any) -> list[Any]:
        return list(function(*[np.array(value) for value in values]))

    return list(io_callback(on_host, results, *leaves, ordered=True))

"""A collective of a program compiled by JAX."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from samestep.reduce_ops import ReduceOp


class Collective(NamedTuple):
    """A collective at one place in a program, without its arrays."""

    group: Any
    """The backend's group for compiled programs."""
    verb: str
    act: str
    """What the user called, for errors."""
    op: int = ReduceOp.SUM.value
    factor: float = 1.0
    root: int = 0
    timeout: float = math.inf
    names: tuple[str, ...] = ("",)
    """Of the leaves of a tree."""
    flags: tuple[tuple[str, str], ...] = ()
    """Leaves of a tree that are not sent and must be equal: names, and what they are."""
    explain: Callable[..., None] | None = None
    """For trees, which the ranks compare: `explain(collective, shapes, dtypes)` raises where they differ."""

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
    facts: tuple[tuple[str, str], ...] = ()
    """Names and texts of what must be equal beside a tree."""
    compared: tuple[str, ...] = ()
    """Names of arrays that must be equal, which stand behind the leaves and have no results."""
    cure: str = ""
    """The end of the error where they are not."""
    explain: Callable[..., None] | None = None
    """For trees, which the ranks compare: `explain(collective, shapes, dtypes, data)` raises where they differ. `data`:
    the elements of `compared`."""

"""Decisions with the same result on all ranks."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from samestep import _core, arrays, trees
from samestep._util.json_layout import Many
from samestep._util.loaded import is_a
from samestep.errors import InvalidArgumentError
from samestep.group.group import Group
from samestep.step.leaves import gradients_of
from samestep.trees import signature
from samestep.trees.fusion import timer
from samestep.trees.identity import is_array, is_number, passes

_WHOLE = ("int", "uint", "bool")


def any_rank(backend: Group, flag: object, act: str, timeout: float | None) -> bool:
    """Whether `flag` is true on any rank. Collective; `act`: the user's call."""
    mine = np.array([bool(flag)], np.int64)
    with _core.UserCall(act):
        return bool(backend.allreduce(mine, "max", timeout=timeout)[0])


def all_finite(backend: Group, tree: Any, timeout: float | None) -> bool:
    """See `Backend.all_finite`."""
    act = "all_finite()"
    flat = trees.flatten(gradients_of(tree))
    finite = [_is_finite(leaf) for leaf in flat.leaves]
    why = "in which no numbers can be seen; pass its arrays in a dict, or take it out of the tree"
    unknown = {
        i: f"a {type(flat.leaves[i]).__name__} {why}" for i, known in enumerate(finite) if known is None
    }
    mine = np.array([2 if unknown else not all(finite)], np.int64)
    left = timer(timeout)
    with _core.UserCall(act):
        worst = int(backend.allreduce(mine, "max", timeout=left())[0])
        if worst < 2:
            return worst == 0
        kinds = signature.with_refusals([""] * len(finite), unknown)
        found = backend._allgather_facts([flat.names, kinds], [Many(str), Many(str)], left())
        signature.raise_refused(
            backend.name, [signature.Description(act, rows[0], rows[1], []) for rows in found]
        )
    raise AssertionError  # a rank has counted one


def _is_finite(leaf: Any) -> bool | None:
    """Whether all numbers of a leaf are finite; None if they cannot be seen."""
    if isinstance(leaf, (np.ndarray, np.generic)) and not arrays.is_float0(leaf):
        kind = leaf.dtype.char
        return None if kind in "OV" else kind in "SUT" or bool(np.isfinite(leaf).all())
    if isinstance(leaf, (float, complex)):
        return bool(np.isfinite(leaf))
    if passes(leaf) or isinstance(leaf, numbers.Rational):
        return True
    try:
        if not is_array(leaf):
            return math.isfinite(leaf) if is_number(leaf) else None
        return _array_is_finite(leaf)
    except (InvalidArgumentError, TypeError, ValueError):
        return None


def _array_is_finite(leaf: Any) -> bool:
    info = arrays.info(leaf)
    if info.dtype.startswith(_WHOLE):
        return True
    if is_a(leaf, "torch", "Tensor"):
        wide = leaf.float() if info.dtype.startswith("float8") else leaf  # of which torch does not know it
        return bool(wide.isfinite().all())
    if info.device != "cpu":
        copy = np.empty(info.shape, info.dtype)
        _core.pack([leaf], copy)
        leaf = copy
    return bool(np.isfinite(np.asarray(leaf)).all())

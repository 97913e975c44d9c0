"""Decisions with the same result on all ranks."""

from __future__ import annotations

import cmath
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep import _core, arrays, trees

if TYPE_CHECKING:
    from samestep.group.group import Group

__all__ = ["any_rank", "is_finite"]

_WHOLE = ("int", "uint", "bool")


def any_rank(backend: Group, flag: object, act: str, timeout: float | None) -> bool:
    """Whether `flag` is true on any rank. Collective; `act`: the user's call."""
    mine = np.array([bool(flag)], np.int64)
    with _core.UserCall(act):
        return bool(backend.allreduce(mine, "max", timeout=timeout)[0])


def is_finite(tree: Any) -> bool:
    """Whether all elements of a tree on this rank are finite.

    Example:
      >>> is_finite([1.0, np.ones(3), None, "text"]), is_finite({"loss": float("inf")})
      (True, False)
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tree, torch.nn.Module):
        tree = [parameter.grad for parameter in tree.parameters()]
    return all(_leaf_is_finite(leaf) for leaf in trees.flatten(tree).leaves)


def _leaf_is_finite(leaf: Any) -> bool:
    if isinstance(leaf, (float, complex, np.floating, np.complexfloating)):
        return cmath.isfinite(complex(leaf))
    if not arrays.is_array(leaf) or arrays.info(leaf).dtype.startswith(_WHOLE):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        return bool(torch.isfinite(leaf).all())
    if arrays.info(leaf).device == "cpu":
        return bool(np.isfinite(np.asarray(leaf)).all())
    return bool(np.isfinite(_on_host(leaf)).all())


def _on_host(leaf: Any) -> np.ndarray[Any, Any]:
    info = arrays.info(leaf)
    copy = np.empty(info.shape, info.dtype)
    _core.pack([leaf], copy)
    return copy

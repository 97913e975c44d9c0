"""The weights of a mean over ranks: exchanged where ranks compare their trees, checked, and applied."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from samestep import _core, arrays
from samestep.arrays import ArrayInfo
from samestep.errors import InvalidArgumentError
from samestep.group.group import Group
from samestep.reduce_ops import MEAN
from samestep.trees import signature
from samestep.trees.fusion import Timer, fused
from samestep.trees.structure import flatten

_WHOLE = 2**53  # below it every whole number is a float
_REAL = {"complex64": "float32", "complex128": "float64"}  # pairs: weights are real
_FLOATS = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
_INTEGERS = dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "int64")
ADDED_AS = {**_FLOATS, **_REAL, **_INTEGERS}
"""By dtype of an array: the dtype in which it is added. Half types are so rounded once, at the end."""
_MOST = {"float32": 1e30, "float64": 1e150}
_REFUSES = 2  # what a rank says in place of whether it lacks a tree


def weight_of(weight: Any, act: str) -> float:
    """A weight as a float.

    Raises:
      InvalidArgumentError: it is negative, infinite or NaN.
    """
    try:
        value = float(weight)
    except OverflowError:
        value = math.inf
    if not (math.isfinite(value) and value >= 0):
        raise InvalidArgumentError(f"{act}: weight must be finite and >= 0, got {weight}")
    return value


def _sum(weights: Sequence[float]) -> float:
    try:
        return math.fsum(weights)
    except OverflowError:
        return math.inf  # which `require_sum` refuses


def is_whole(weight: float) -> bool:
    """Whether arrays of every dtype can be multiplied by `weight`, or divided by it."""
    return weight < _WHOLE and weight == int(weight)


def why_not(dtype: str, weight: float) -> str:
    """Why arrays of `dtype` have no mean, or cannot be multiplied by a weight; "" if they can.

    Whole numbers alone are taken for integers. Products of others would leave the range of the dtype in which arrays
    are added although their mean does not.
    """
    added_as = ADDED_AS.get(dtype)
    if added_as is None:
        return f"has dtype {dtype}, which has no mean"
    most, which = _MOST.get(added_as, math.inf), ""
    if added_as == "int64" and (weight != int(weight) or weight >= 2**63):
        which = "whole numbers below 2**63"
    elif weight and not is_whole(weight) and not 1 / most <= weight <= most:
        which = f"from {1 / most:g} to {most:g}"
    return which and f"has dtype {dtype}, for which weights are {which}, got {weight}"


def require_sum(groups: Iterable[str], weight: float, act: str) -> None:
    """Check that sums in these dtypes can be divided by the sum of the weights.

    Raises:
      InvalidArgumentError: it is zero, too large, or not whole where leaves are. On all ranks, which know the sum.
    """
    if weight == 0:
        raise InvalidArgumentError(f"{act}: all weights are zero")
    for group in groups:
        most = _MOST.get(group, math.inf)
        if "int" in group and not is_whole(weight):
            why = "whole numbers, the sum must be one, too, and below 2**53"
        elif weight > most:
            why = f"added in {group}, the sum must be at most {most:g}"
        else:
            continue
        raise InvalidArgumentError(f"{act}: the weights sum up to {weight}; where leaves are {why}")


class Weights(signature.Comparison):
    """This rank's weight in a mean, and the sum over all ranks once they have compared their trees."""

    def __init__(self, backend: Group, act: str) -> None:
        super().__init__()
        self._backend = backend
        self._act = act
        self._problem = ""
        self._tree: Any = None
        self._lacks_tree = False
        self.mine = self.total = 0.0

    def same_everywhere(self, backend: Group, digest: int, timeout: float | None) -> bool:
        """With the weights in the same message."""
        while True:
            row = np.array([digest ^ self.key, _REFUSES if self._problem else self._lacks_tree, 0], np.uint64)
            row.view(np.float64)[2] = self.mine
            table = np.empty((backend.size, 3), np.uint64)
            backend.allgather(row, out=table, timeout=timeout)
            digests, states, _bits = zip(*table.tolist(), strict=True)
            if _REFUSES in states:
                self._raise(backend._allgather_facts(self._problem, str, timeout))
            self.total = _sum(table.view(np.float64)[:, 2].tolist())
            if not self.total:
                require_sum((), self.total, f"{self._act} in group {backend.name}")
            if len(set(states)) == 1:
                return len(set(digests)) == 1
            if self._share_containers(states.index(False), timeout):
                return False

    def _raise(self, problems: Sequence[str]) -> NoReturn:
        texts = "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(problems) if why)
        raise InvalidArgumentError(f"{self._act} in group {self._backend.name}: {texts}")

    def refuse(self, why: str, timeout: float | None) -> None:
        """Raise InvalidArgumentError on all ranks, which compare trees at this time."""
        self._problem = why
        if self._backend.size == 1:
            self._raise([why])
        self.same_everywhere(self._backend, 0, timeout)

    def of_tree(self, tree: Any, timeout: float | None) -> Any:
        """The tree that is reduced; for None, which a rank without items may pass, one of Nones like the others'."""
        self._tree = tree
        self._lacks_tree = tree is None and not self.mine
        if self._lacks_tree and self._backend.size > 1:
            self.same_everywhere(self._backend, 0, timeout)
        return self._tree

    def _share_containers(self, root: int, timeout: float | None) -> bool:
        """Give them to ranks that have none. Whether this is one of those."""
        flat = flatten(self._tree)
        values = [None if arrays.is_array(leaf) else leaf for leaf in flat.leaves]
        received = self._backend.bcast_object(flat.rebuild(values), root=root, timeout=timeout)
        lacked, self._lacks_tree = self._lacks_tree, False
        if lacked:
            self._tree = received
        return lacked

    def suits(self, tree: _core.FastTree) -> bool:
        """Whether this weight and any others that suit pass `why_not` and `require_sum`; False if it takes a look."""
        most, upper = _MOST["float32"], self.mine * self._backend.size
        return (is_whole(self.mine) and upper < _WHOLE) or (
            1 / most <= self.mine and upper <= most and not tree.has_integers
        )

    def reduce(self, tree: _core.FastTree, left: Timer) -> None:
        """Store the mean over all ranks into the arrays of a tree."""
        seconds = self._backend._seconds(left())
        fused(self._backend).allreduce(tree, MEAN, self.mine, seconds, self.total)

    def refusals(self, infos: Sequence[ArrayInfo | None]) -> dict[int, str]:
        """Why leaves cannot be averaged, by index."""
        found = {i: why_not(info.dtype, self.mine) for i, info in enumerate(infos) if info is not None}
        return {i: why for i, why in found.items() if why}

    def operator_for(self, infos: Sequence[ArrayInfo]) -> tuple[int, float, float]:
        """What `allreduce_leaves` takes for the mean of such arrays. Raises as `require_sum`, on all ranks."""
        groups = {ADDED_AS[info.dtype] for info in infos}
        require_sum(groups, self.total, f"{self._act} in group {self._backend.name}")
        return MEAN, self.mine, self.total

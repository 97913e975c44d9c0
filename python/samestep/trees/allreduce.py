"""Reductions of the leaves of a tree over all ranks, in few messages, and the weights of means."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from samestep import _core, arrays, trees
from samestep._util.json_layout import Many
from samestep.arrays import ArrayInfo
from samestep.errors import InvalidArgumentError
from samestep.group import compiled
from samestep.group.group import Group
from samestep.reduce_ops import MEAN, Op, Premul, ReduceOp, resolve, why_too_large
from samestep.trees import compiled_trees, reducible, signature
from samestep.trees.divided import parts_in
from samestep.trees.facts import NO_FACTS, Facts, refused_texts, static_texts
from samestep.trees.fusion import Timer, allreduce_leaves, fused, timer
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
    """A weight as a float; raises InvalidArgumentError if it is negative, infinite or NaN."""
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

    @property
    def operator(self) -> tuple[int, float, float]:
        """The mean, as the core takes it."""
        return MEAN, self.mine, self.total

    def refusals(self, infos: Sequence[ArrayInfo | None]) -> dict[int, str]:
        """Why leaves cannot be averaged, by index."""
        known = ((i, info.dtype) for i, info in enumerate(infos) if info is not None)
        return {i: why for i, dtype in known if (why := why_not(dtype, self.mine))}

    def operator_for(self, infos: Sequence[ArrayInfo]) -> tuple[int, float, float]:
        """`operator`, for such arrays. Raises as `require_sum`, on all ranks."""
        groups = {ADDED_AS[info.dtype] for info in infos}
        require_sum(groups, self.total, f"{self._act} in group {self._backend.name}")
        return self.operator


def reduce_tree(
    backend: Group,
    tree: Any,
    op: Op,
    act: str,
    timeout: float | None,
    *,
    weights: Weights | None = None,
    facts: Facts = NO_FACTS,
) -> Any:
    """Reduce every array and number of `tree`, see `samestep.allreduce_tree`. Collective.

    Args:
      act: the call, for the texts of errors.
      timeout: seconds for all of it; None for the group's timeout.
      weights: of ranks; then `op` is AVG.
      facts: what must be equal on all ranks as well.
    """
    with _core.UserCall(act):
        left = timer(timeout)
        if weights is not None:
            weights.add(facts)
            tree = weights.of_tree(tree, left())
        by = weights or (signature.Comparison(facts) if facts is not NO_FACTS else signature.BY_DIGEST)
        divided = parts_in(tree)
        fast, compared = None, False
        if not divided:
            fast, compared = signature.try_fast_tree(backend, tree, act, left(), by, device=backend._device)
        if fast is not None and not fast.on_device:
            code, factor, *total = resolve(op) if weights is None else weights.operator
            fused(backend).allreduce(fast, code, factor, backend._seconds(left()), *total)
            return fast.copy()
        flat = trees.flatten(tree)
        if fast is not None:
            infos = list(map(arrays.info, flat.leaves))
            return flat.rebuild(_reduce_arrays(backend, op, weights, left, flat.leaves, infos, flat.names))
        if flat.static:
            static = static_texts(flat)
            by, facts = by if weights else signature.Comparison(facts), facts.with_texts(static)
            by.add(Facts(tuple(static)))
        if compiled.is_traced(flat.leaves):
            facts = facts.with_texts(refused_texts(flat, divided, backend.rank))
            if weights is not None:
                weights.refuse(f"{act}: weight is not available in functions compiled by JAX", left())
            code, factor = resolve(op)
            reducible.refuse_others(flat.names, flat.leaves, act)
            taken = reducible.is_reduced_number
            return compiled_trees.call(
                backend, flat, taken, "allreduce", act, op=code, factor=factor, timeout=left(), facts=facts
            )
        return flat.rebuild(_reduce(backend, flat, op, act, left, by, compared=compared, divided=divided))


def op_name(op: Op, verb: str) -> str:
    """Name of an operator, the same on ranks that mean the same; raises as `resolve`, with `verb` before the text."""
    code, _ = resolve(op, verb)
    return "PREMUL" if isinstance(op, Premul) else ReduceOp(code).name


def _reduce(  # noqa: PLR0917 - the call, one after the other
    backend: Group,
    flat: trees.Flat,
    op: Op,
    act: str,
    left: Timer,
    by: signature.Comparison,
    *,
    compared: bool,
    divided: Mapping[int, str],
) -> list[Any]:
    names, leaves = flat.names, flat.leaves
    weights = by if isinstance(by, Weights) else None
    values, numbers, looks = reducible.describe_leaves(names, leaves, act, backend, waiting=backend)
    clash = signature.join_views(names, looks, reads=weights is None)
    kinds, infos, aliases = looks.kinds, looks.infos, looks.aliases
    if weights is None:
        verb = resolve(op)
        refused = {i: why for i in numbers if (why := why_too_large(leaves[i], *verb, backend.size))}
    else:
        refused = weights.refusals(infos)
    if refused := {**refused, **divided}:
        kinds = signature.with_refusals(kinds, refused)
    mine = signature.Description(act, names, kinds, aliases)
    everyone = signature.compare(
        backend, mine, left, compared=compared, by=by, absent_is_fine=True, aliases=weights is None
    )
    signature.refuse_clash(backend.name, mine, everyone, clash)
    if everyone is not None:
        _agree_on_aliases(everyone, values, aliases, act)
        infos = _fill_in_zeros(backend, names, values, infos, act=act, left=left)

    call = functools.partial(_reduce_arrays, backend, op, weights, left)
    values = signature.in_each_array(call, names, values, looks._replace(kinds=kinds, infos=infos))
    for i in numbers:
        values[i] = type(leaves[i])(values[i][()])
    return values


def _reduce_arrays(  # noqa: PLR0917 - the operator, then the arrays
    backend: Group,
    op: Op,
    weights: Weights | None,
    left: Timer,
    leaves: Sequence[Any],
    infos: Sequence[ArrayInfo],
    names: Sequence[str],
) -> list[Any]:
    code, *factors = resolve(op) if weights is None else weights.operator_for(infos)
    return allreduce_leaves(backend, leaves, infos, int(code), *factors, names=names, left=left)


def _agree_on_aliases(
    everyone: Sequence[signature.Description], values: list[Any], aliases: list[int], act: str
) -> None:
    """Make one array of what is one on all ranks: of None here, too, but not of what is two arrays elsewhere."""
    for i, mine in enumerate(aliases):
        found = {d.aliases[i] for d in everyone if d.kinds[i] != signature.ABSENT} or {i}
        aliases[i] = found.pop() if len(found) == 1 else i
        if aliases[i] == i != mine:
            values[i] = arrays.of(values[mine]).like(values[mine])
            arrays.copy(values[mine], values[i], act)


def _fill_in_zeros(
    backend: Group,
    names: Sequence[str],
    values: list[Any],
    infos: Sequence[ArrayInfo | None],
    *,
    act: str,
    left: Timer,
) -> list[ArrayInfo | None]:
    """Where this rank has None and another an array, put zeros of that dtype, shape, library and order of axes.

    Raises:
      InvalidArgumentError: that library makes no such arrays, on all ranks.
    """
    mine = [
        info and (arrays.of(value).name, info.dtype, info.shape, arrays.order_of(value))
        for value, info in zip(values, infos, strict=True)
    ]
    layout = [str, str, Many(int), Many(int)]
    everyone = backend._allgather_facts(mine, Many((layout, None)), left())
    columns = list(zip(*everyone, strict=True))
    found = [next((kind for kind in kinds if kind), None) for kinds in columns]
    for name, kinds, known in zip(names, columns, found, strict=True):
        if known and known[3] and None in kinds and not arrays.named(known[0]).computes:
            raise InvalidArgumentError(
                f"{act} in group {backend.name}: {signature.leaf_text(name)} is None on rank {kinds.index(None)} and "
                "not row-major elsewhere, in device memory of a library that is not asked for such arrays; pass a "
                "contiguous copy"
            )
    filled = list(infos)
    for i, known in enumerate(found):
        if values[i] is None and known:
            library, dtype, shape, order = known
            values[i] = arrays.from_bytes(None, library, dtype, shape, backend.device, order)
            filled[i] = arrays.info(values[i])
    return filled

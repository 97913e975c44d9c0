"""Reductions of the leaves of a tree over all ranks, in few messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samestep import _core, arrays, trees
from samestep._util.json_layout import Many
from samestep.arrays import ArrayInfo
from samestep.errors import InvalidArgumentError
from samestep.group import compiled
from samestep.group.group import Group
from samestep.reduce_ops import Op, Premul, ReduceOp, resolve, why_too_large
from samestep.trees import compiled_trees, reducible, signature
from samestep.trees.divided import parts_in
from samestep.trees.facts import NO_FACTS, Facts, refused_texts, static_texts
from samestep.trees.fusion import Timer, allreduce_leaves, fused, timer
from samestep.trees.weights import Weights


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
    """Reduce every array and number of `tree` over all ranks, fused into few messages. Collective.

    Args:
      tree: of the same structure, shapes and dtypes on all ranks.
      op: as for `Backend.allreduce`.
      act: the call, for the texts of errors.
      timeout: seconds for all of it; None for the group's timeout.
      weights: of ranks; then `op` is AVG.
      facts: what must be equal on all ranks as well.

    Returns:
      The reduced tree, see `samestep.allreduce_tree`.
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
            if weights is None:
                fused(backend).allreduce(fast, *resolve(op), backend._seconds(left()))
            else:
                weights.reduce(fast, left)
            return fast.copy()
        flat = trees.flatten(tree)
        if fast is not None:
            infos = list(map(arrays.info, flat.leaves))
            code, *factors = resolve(op) if weights is None else weights.operator_for(infos)
            reduced = allreduce_leaves(
                backend, flat.leaves, infos, int(code), *factors, names=flat.names, timeout=left()
            )
            return flat.rebuild(reduced)
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
    """Name of an operator, the same on ranks that mean the same; `verb` stands before errors.

    Raises:
      InvalidArgumentError: `op` stands for no operator.
    """
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
    refused = _overflows(leaves, numbers, op, backend.size) if weights is None else weights.refusals(infos)
    if refused := {**refused, **divided}:
        kinds = signature.with_refusals(kinds, refused)
    mine = signature.Description(act, names, kinds, aliases)
    everyone = signature.gather_if_different(backend, mine, left, compared=compared, by=by)
    if everyone is not None:
        signature.check_same(backend.name, everyone, absent_is_fine=True, aliases=weights is None)
    signature.refuse_clash(backend.name, mine, everyone, clash)
    if everyone is not None:
        _agree_on_aliases(everyone, values, aliases, act)
        infos = _fill_in_zeros(backend, names, values, infos, act=act, left=left)

    moved = {i: info for i, info in enumerate(infos) if info and aliases[i] == i}
    known = list(moved.values())
    code, *factors = resolve(op) if weights is None else weights.operator_for(known)
    reduced = allreduce_leaves(
        backend,
        [values[i] for i in moved],
        known,
        int(code),
        *factors,
        names=[names[i] for i in moved],
        timeout=left(),
    )
    for i, value in zip(moved, reduced, strict=True):
        values[i] = value
    for i in numbers:
        values[i] = type(leaves[i])(values[i][()])
    return [values[i if kinds[i].startswith(signature.VIEW) else alias] for i, alias in enumerate(aliases)]


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


def _overflows(leaves: Sequence[Any], numbers: Sequence[int], op: Op, size: int) -> dict[int, str]:
    """Which Python ints may be too large for the result to fit their dtype, and what to do. Arrays wrap around."""
    verb, factor = resolve(op)
    as_op = ReduceOp.SUM.value if verb == ReduceOp.AVG.value else verb
    return {i: why for i in numbers if (why := why_too_large(leaves[i], as_op, factor, size))}


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

"""Gradients, or any tree of arrays, reduced over all ranks in few messages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep import agreement, arrays, traced, trees
from samestep.errors import InvalidArgumentError
from samestep.fusion import Timer, allreduce_leaves, fused, timer
from samestep.reduce_ops import Premul, ReduceOp, resolve
from samestep.verbs import require_backend

if TYPE_CHECKING:
    from samestep.arrays import ArrayInfo
    from samestep.backend import Backend


def allreduce_gradients(
    backend: Backend, grads: Any, op: Any = ReduceOp.AVG, *, timeout: float | None = None
) -> Any:
    """Average gradients over all ranks: a tree in, the tree of mean gradients out. Collective.

    As `allreduce_tree`. A torch module stands for the `.grad` of its parameters, which are written in place.

    Example:
      >>> import numpy as np, samestep as ss
      >>> backend = ss.initialize()
      >>> grads = {"weight": np.ones((2, 2)), "bias": None}
      >>> ss.allreduce_gradients(backend, grads)["bias"] is None
      True
    """
    require_backend("allreduce_gradients", backend)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(grads, torch.nn.Module):
        return allreduce_tree(backend, grads, op, timeout=timeout)
    parameters = dict(grads.named_parameters())
    means = allreduce_tree(backend, {name: p.grad for name, p in parameters.items()}, op, timeout=timeout)
    for name, parameter in parameters.items():
        parameter.grad = means[name]
    return grads


def allreduce_tree(
    backend: Backend, tree: Any, op: Any = ReduceOp.SUM, *, timeout: float | None = None
) -> Any:
    """Reduce every array and number of `tree` over all ranks, fused into few messages. Collective.

    Arrays that can be written are, and are returned themselves. A leaf that is None here but an array on
    some other rank counts as zeros (and comes back as an array); None everywhere stays None. Strings,
    flags, functions and the like are passed through. Under `jax.jit` the reduction becomes part of the
    program.

    Args:
      backend: the group.
      tree: of the same structure, shapes and dtypes on all ranks.
      op: as for `Backend.allreduce`. AVG divides by the number of ranks, also where some had None.
      timeout: seconds for all of it; None for the backend's own limit.

    Returns:
      A tree of the same containers.

    Raises:
      MismatchError: on all ranks, if the trees differ; names the first leaf that does. Nothing has changed.
      InvalidArgumentError: `tree` is no tree of arrays, e.g. a generator.

    Example:
      >>> import numpy as np, samestep as ss
      >>> backend = ss.initialize()
      >>> backend.allreduce_tree([np.ones(2), 3.0], "sum")
      [array([1., 1.]), 3.0]
    """
    left = timer(timeout)
    plain, compared = agreement.plain(backend, tree, _act(op), left())
    if plain is not None:
        fused(backend).all_reduce(plain, *resolve(op), backend._seconds(left()))
        return plain.copy()
    flat = trees.flatten(tree)
    if traced.is_traced(flat.leaves):
        return flat.rebuild(_reduce_traced(backend, flat, op))
    if flat.names == [""] and agreement.look_at([""], flat.leaves).whats == [agreement.OBJECT]:
        raise InvalidArgumentError(
            f"allreduce of a tree in group {backend.name}: {type(tree).__name__} is no tree of arrays; "
            "pass a dict, list, tuple or dataclass of arrays (a generator must become a list)"
        )
    return flat.rebuild(_reduce(backend, flat.names, flat.leaves, op, left, compared=compared))


def _act(op: Any) -> str:
    return f"allreduce of a tree (op={op_name(op)})"


def op_name(op: Any) -> str:
    """Name of an operator, the same on ranks that mean the same.

    Raises:
      InvalidArgumentError: `op` stands for no operator.
    """
    code, _ = resolve(op)
    return "PREMUL" if isinstance(op, Premul) else ReduceOp(code).name


def _reduce(
    backend: Backend,
    names: list[str],
    leaves: Sequence[Any],
    op: Any,
    left: Timer,
    *,
    compared: bool = False,
) -> list[Any]:
    values = list(leaves)
    numbers = [i for i, leaf in enumerate(leaves) if _is_reducible_number(leaf)]
    for i in numbers:
        values[i] = np.asarray(leaves[i])
    whats, infos, places = agreement.look_at(names, values)
    for i, info in enumerate(infos):
        if info is not None and not info.writable:
            places[i] = i  # reduced into a new array, so it may well stand in two places
    mine = agreement.Description(_act(op), names, whats, places)
    everyone = agreement.everyones(backend, mine, left, compared=compared)
    if everyone is not None:
        agreement.check_same(backend.name, everyone, absent_is_fine=True)
        for i, what in enumerate(whats):
            if what == agreement.ABSENT:  # the same array as elsewhere
                places[i] = next((d.places[i] for d in everyone if d.whats[i] != agreement.ABSENT), i)
        infos = _fill_in_zeros(backend, values, infos, left)

    moved = [(i, info) for i, info in enumerate(infos) if info and places[i] == i]
    reduced = allreduce_leaves(
        backend, [values[i] for i, _ in moved], [info for _, info in moved], op, timeout=left()
    )
    for (i, _), value in zip(moved, reduced, strict=True):
        values[i] = value
    for i in numbers:
        values[i] = type(leaves[i])(values[i][()])
    return [values[place] for place in places]


def _is_reducible_number(leaf: Any) -> bool:
    if isinstance(leaf, np.generic):
        return not isinstance(leaf, (np.bool_, np.flexible, np.object_, np.datetime64, np.timedelta64))
    return type(leaf) in (int, float, complex)  # flags and enums are passed through


def _fill_in_zeros(
    backend: Backend, values: list[Any], infos: Sequence[ArrayInfo | None], left: Timer
) -> list[ArrayInfo | None]:
    """Where this rank has None and another an array, put zeros of that dtype, shape and library."""
    mine = [
        info and (arrays.library_of(value), info.dtype, info.shape)
        for value, info in zip(values, infos, strict=True)
    ]
    everyone = backend.allgather_object(mine, timeout=left())
    filled = list(infos)
    for i, kinds in enumerate(zip(*everyone, strict=True)):
        known = next((kind for kind in kinds if kind), None)
        if values[i] is None and known:
            zeros = arrays.new_of(*known)
            arrays.fill_with_zeros(zeros)
            values[i] = arrays.finish_for(known[0], zeros)
            filled[i] = arrays.info(values[i])
    return filled


def _reduce_traced(backend: Backend, flat: trees.Flat, op: Any) -> list[Any]:
    """The same at the time the compiled program runs: one call back for the whole tree."""
    moved = [
        i
        for i, leaf in enumerate(flat.leaves)
        if arrays.is_jax(leaf) or arrays.is_array(leaf) or _is_reducible_number(leaf)
    ]
    names = [flat.names[i] for i in moved]
    group = traced.group_of(backend)
    results = list(flat.leaves)
    reduced = traced.call(
        lambda *leaves: _reduce(group, names, leaves, op, timer(None)), [flat.leaves[i] for i in moved]
    )
    for i, value in zip(moved, reduced, strict=True):
        results[i] = value
    return results

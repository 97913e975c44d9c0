"""Gradients, or any tree of arrays, reduced over all ranks; with weights if their batches differ."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar, cast

import numpy as np

from samestep import _core, arrays, trees
from samestep._util.text import error_text
from samestep.errors import InvalidArgumentError
from samestep.group import compiled
from samestep.group.backend_argument import takes_backend
from samestep.group.group import Group
from samestep.reduce_ops import Op, ReduceOp, resolve
from samestep.step import added
from samestep.step.accumulator import Accumulator
from samestep.step.together import note_reduced
from samestep.trees import allreduce, signature, views
from samestep.trees.fusion import bump_versions, timer

_Tree = TypeVar("_Tree")


@takes_backend
def allreduce_gradients(
    backend: Group,
    grads: _Tree,
    op: Op = ReduceOp.AVG,
    *,
    weight: float | None = None,
    timeout: float | None = None,
) -> _Tree:
    """Average gradients over all ranks: a tree in, the tree of mean gradients out. Collective.

    As `allreduce_tree`. A torch module stands for the `.grad` of its parameters, which are written in place.

    With `weight`, e.g. the number of items or tokens of this rank's batch, the result is the gradient of the joined
    batch, even if batches differ between ranks: the sum of weight times gradient, over the sum of the
    weights.

    Example:
      >>> import numpy as np, samestep as ss
      >>> backend = ss.initialize()
      >>> grads = {"weight": np.ones((2, 2)), "bias": None}
      >>> ss.allreduce_gradients(backend, grads)["bias"] is None
      True
    """
    act = f"allreduce_gradients(op={allreduce.op_name(op, 'allreduce_gradients')})"
    tree = added.gradients_of(grads, act)
    means = _reduce(backend, tree, op, weight, timeout=timeout, act=act)
    if tree is grads:
        return cast("_Tree", means)
    for name, parameter in cast(Any, grads).named_parameters():
        parameter.grad = means[name]
    return grads


@takes_backend
def allreduce_tree(
    backend: Group,
    tree: _Tree,
    op: Op = ReduceOp.SUM,
    *,
    weight: float | None = None,
    timeout: float | None = None,
) -> _Tree:
    """Reduce every array and number of `tree` over all ranks, fused into few messages. Collective.

    Arrays that can be written receive the result and are returned themselves. Leaves that are views of the same
    elements, e.g. transposed, are reduced once. A leaf that is None here but an array on some other rank counts as
    zeros (and comes back as an array); None everywhere stays None. Texts, flags, members of enumerations, functions,
    classes and the like are returned as they are; flags must be equal on all ranks. Under `jax.jit` the reduction
    becomes part of the program.

    Args:
      backend: the group.
      tree: of the same structure, shapes and dtypes on all ranks.
      op: as for `Backend.allreduce`. AVG divides by the number of ranks, also if some had None.
      weight: with AVG only: the weight of this rank, finite and >= 0. The result is the sum of weight times array,
        and one division by the sum of the weights, half types in float32. For integers it is a whole number, and the
        mean is exact, rounded down. The values of a tree with weight 0 are not used, but are overwritten like
        others. Not in functions compiled by JAX.
      timeout: seconds for all of it; None for the timeout of the backend.

    Returns:
      A tree of the same containers.

    Raises:
      MismatchError: on all ranks, if the trees differ; names the first leaf that does. Nothing has changed.
      InvalidArgumentError: on all ranks, if a leaf of any rank is none of these, such as an object in which no arrays
        can be seen, a date, or an int that may exceed 64 bits; names the leaf. Or `tree` is not a tree of arrays, e.g.
        a generator; or `weight` is negative, infinite or NaN, or out of the range in which products with it cannot
        overflow; or all weights are zero; or leaves share some of their elements and are written.

    Example:
      >>> import numpy as np, samestep as ss
      >>> backend = ss.initialize()
      >>> backend.allreduce_tree([np.ones(2), 3.0], "sum")
      [array([1., 1.]), 3.0]
    """
    act = f"allreduce_tree(op={allreduce.op_name(op, 'allreduce_tree')})"
    return cast("_Tree", _reduce(backend, tree, op, weight, timeout=timeout, act=act))


def _reduce(
    backend: Group, tree: Any, op: Op, weight: float | None, *, timeout: float | None, act: str
) -> Any:
    if weight is None:
        reduced = allreduce.reduce_tree(backend, tree, op, act, timeout)
    else:
        reduced = _weighted_mean(backend, tree, op, weight, timeout=timeout, act=act)
    note_reduced()
    return reduced


def _weighted_mean(
    backend: Group, tree: Any, op: Op, weight: float, *, timeout: float | None, act: str
) -> Any:
    """The weighted mean over all ranks: into the arrays of `tree` that can be written, else new ones."""
    flat = trees.flatten(tree)
    with _core.UserCall(act):
        left = timer(timeout)
        total = Accumulator(backend)
        total._is_compared = True  # there is no number of shards to compare
        total._act = act  # for errors
        total._recorder = None  # of weighted ranks nobody expects the bits of another number of ranks
        try:
            weight = _checked_weight(op, weight, flat.leaves, act)
            backend._await_streams(flat.leaves, left())
            total._look_at(tree, flat)  # also with a weight of 0
            aliases = _aliases(backend, flat, act)
            total.add(tree, weight=weight)
        except InvalidArgumentError as error:  # the other ranks wait in `mean`, which raises the same on all
            total._failure = error_text(error)
        except Exception as error:
            total._failure = error_text(error)
            with contextlib.suppress(Exception):
                total.mean(timeout=left())
            raise
        mean = total.mean(timeout=left())
    if tree is None:
        return mean
    new = trees.flatten(mean).leaves
    written = zip(flat.leaves, new, aliases, strict=True)
    return flat.rebuild(
        [_into(old, value, again=i != alias) for i, (old, value, alias) in enumerate(written)]
    )


def _aliases(backend: Group, flat: trees.Flat, act: str) -> list[int]:
    """By leaf, the first leaf of the same elements.

    Raises:
      InvalidArgumentError: leaves share memory in part, and can be written.
    """
    looks = signature.describe_leaves(flat.names, flat.leaves, act, backend)
    clash = views.join_views(flat.names, looks, reads=False)
    mine = signature.Description(act, flat.names, looks.kinds, looks.aliases)
    views.refuse_clash(backend.name, mine, None, clash)
    return looks.aliases


def _checked_weight(op: Op, weight: float, leaves: list[Any], act: str) -> float:
    if resolve(op) != resolve(ReduceOp.AVG):
        raise InvalidArgumentError(f"{act}: weight is for op AVG, the weighted mean")
    if compiled.is_traced(leaves):
        raise InvalidArgumentError(f"{act}: weight is not available in functions compiled by JAX")
    return added.weight_of(weight, act)


def _into(old: Any, new: Any, *, again: bool) -> Any:
    """The mean, in the array of the tree if that can be written.

    An array that stands in the tree `again` has a mean already. On ranks where it stands there once, the mean in the
    other place is another one.
    """
    if (
        old is new
        or not arrays.is_array(old)
        or not arrays.info(old).writable
        or (again and _bits(old) != _bits(new))
    ):
        return new
    arrays.copy(new, old, "allreduce_tree")
    bump_versions([old])
    return old


def _bits(array: Any) -> bytes:
    memory = np.empty(arrays.info(array).nbytes, np.uint8)
    _core.pack([array], memory)
    return memory.tobytes()

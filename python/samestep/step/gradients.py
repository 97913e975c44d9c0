"""Gradients, or any tree of arrays, reduced over all ranks; with weights if their batches differ."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from samestep import _core
from samestep._util.text import error_text
from samestep.errors import InvalidArgumentError
from samestep.group.backend_argument import takes_backend
from samestep.group.group import Group
from samestep.reduce_ops import Op, ReduceOp, is_mean
from samestep.step import leaves
from samestep.step.together import note_reduced
from samestep.trees import allreduce
from samestep.trees.allreduce import Weights, weight_of
from samestep.trees.facts import NO_FACTS, Facts

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
    return reduce_gradients(backend, grads, op, weight=weight, timeout=timeout)


def reduce_gradients(
    backend: Group,
    grads: _Tree,
    op: Op,
    *,
    weight: float | None,
    timeout: float | None = None,
    facts: Facts = NO_FACTS,
) -> _Tree:
    """The same. `facts`: what must be equal on all ranks as well."""
    act = f"allreduce_gradients(op={allreduce.op_name(op, 'allreduce_gradients')})"
    tree = leaves.gradients_of(grads, act)
    means = _reduce(backend, tree, op, weight, timeout=timeout, act=act, facts=facts)
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
    backend: Group,
    tree: Any,
    op: Op,
    weight: float | None,
    *,
    timeout: float | None,
    act: str,
    facts: Facts = NO_FACTS,
) -> Any:
    weights = None if weight is None else Weights(backend, act)
    if weights is not None:
        try:
            if not is_mean(op):
                raise InvalidArgumentError(f"{act}: weight is for op AVG, the weighted mean")
            weights.mine = weights.total = weight_of(weight, act)
        except (InvalidArgumentError, TypeError, ValueError) as error:
            with _core.UserCall(act):
                weights.refuse(error_text(error), timeout)
    reduced = allreduce.reduce_tree(backend, tree, op, act, timeout, weights=weights, facts=facts)
    note_reduced()
    return reduced

"""The trees of gradients that are added to an `Accumulator`."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from samestep import arrays, trees
from samestep.errors import InvalidArgumentError
from samestep.step.leaves import LeafSpec
from samestep.trees import signature
from samestep.trees.structure import DEEPEST
from samestep.trees.weights import is_whole, why_not

_USUAL = (dict, list, tuple, collections.OrderedDict)


def gradients_of(grads: Any, act: str = "") -> Any:
    """The tree that `grads` stands for: of a torch module the `.grad` of its parameters.

    Raises:
      InvalidArgumentError: `act` takes gradients alone, and the tree begins with a module, a parameter or an optimizer.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return grads
    if isinstance(grads, torch.nn.Module):
        return {name: parameter.grad for name, parameter in grads.named_parameters()}
    first = grads
    for _ in range(DEEPEST):
        if type(first) not in _USUAL or not first:
            break
        first = next(iter(first if isinstance(first, (list, tuple)) else first.values()))
    if (
        act
        and type(first) not in (torch.Tensor, np.ndarray)  # cheaper than to ask the class Parameter
        and isinstance(first, (torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer))
    ):
        raise InvalidArgumentError(
            f"{act}: the tree begins with parameters ({type(first).__name__}), not with gradients; pass one module by "
            "itself, or its gradients, {name: p.grad for name, p in module.named_parameters()}"
        )
    return grads


def rebuild_of(tree: Any, flat: trees.Flat) -> Callable[[Iterable[Any]], Any]:
    """`flat.rebuild`, which keeps the leaves of `tree` alive only if other containers than the usual ones need it."""
    if not trees.is_plain(tree):
        return flat.rebuild
    return trees.flatten(flat.rebuild([None] * len(flat.leaves))).rebuild


def examples(leaves: Sequence[Any], specs: Sequence[LeafSpec]) -> list[Any]:
    """The properties of the leaves that `mean` needs, without the arrays."""
    return [
        type(leaf)(0) if spec.is_number else arrays.sharding_of(leaf) if spec.group else leaf
        for leaf, spec in zip(leaves, specs, strict=True)
    ]


def require_weight(specs: Sequence[LeafSpec], names: Sequence[str], weight: float) -> None:
    """Check that leaves can be multiplied by a weight that is not zero.

    Raises:
      InvalidArgumentError: they cannot; names the first such leaf.
    """
    if is_whole(weight):
        return
    for spec, name in zip(specs, names, strict=True):
        if spec.group and (why := why_not(spec.dtype, weight)):
            raise InvalidArgumentError(f"Accumulator.add: {signature.leaf_text(name)} {why}")


def run_text(indices: range) -> str:
    """A run of shards, for errors.

    Example:
      >>> run_text(range(2, 5)), run_text(range(0))
      ('2 to 4', 'none')
    """
    return f"{indices.start} to {indices.stop - 1}" if indices else "none"

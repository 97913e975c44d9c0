"""The trees of gradients that are added to an `Accumulator`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from samestep import trees
from samestep.errors import InvalidArgumentError
from samestep.step.leaves import LeafSpec
from samestep.trees import signature

__all__ = ["examples", "gradients_of", "rebuild_of", "require_whole", "run_text"]


def gradients_of(grads: Any) -> Any:
    """The tree that `grads` stands for: of a torch module the `.grad` of its parameters."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(grads, torch.nn.Module):
        return grads
    return {name: parameter.grad for name, parameter in grads.named_parameters()}


def rebuild_of(tree: Any, flat: trees.Flat) -> Callable[[Iterable[Any]], Any]:
    """`flat.rebuild`, which keeps the leaves of `tree` alive only if other containers than the usual ones need it."""
    if not trees.is_plain(tree):
        return flat.rebuild
    return trees.flatten(flat.rebuild([None] * len(flat.leaves))).rebuild


def examples(leaves: Sequence[Any], specs: Sequence[LeafSpec]) -> list[Any]:
    """The properties of the leaves that `mean` needs, without the arrays."""
    return [
        type(leaf)(0) if spec.is_number else None if spec.group else leaf
        for leaf, spec in zip(leaves, specs, strict=True)
    ]


def require_whole(specs: Sequence[LeafSpec], names: Sequence[str], weight: float) -> None:
    """Check that a weight is a whole number if leaves are.

    Raises:
      InvalidArgumentError: it is not; names the first such leaf.
    """
    if weight != int(weight) or weight >= 2**63:
        for spec, name in zip(specs, names, strict=True):
            if "int" in spec.group:
                raise InvalidArgumentError(
                    f"Accumulator.add: {signature.leaf_text(name)} has dtype {spec.dtype}, for which weights are whole "
                    f"numbers below 2**63, got {weight}"
                )


def run_text(indices: range) -> str:
    """A run of shards, for errors.

    Example:
      >>> run_text(range(2, 5)), run_text(range(0))
      ('2 to 4', 'none')
    """
    return f"{indices.start} to {indices.stop - 1}" if indices else "none"

"""The containers of torch and JAX, for `trees`, which asks each library only once it has been imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from samestep._util.loaded import is_a

KEY_DATA = ".<random key>"
"""How the name of a leaf ends that is the data of a typed random key of JAX: no attribute has such a name."""


class Node(NamedTuple):
    """One opened container: `rebuild(children)` gives it back."""

    names: Sequence[str]
    children: Sequence[Any]
    rebuild: Callable[[list[Any]], Any]
    static: Any = None
    """What JAX keeps of the container beside its children, such as fields of an equinox module that are no arrays."""


def expand_jax(tree: Any) -> Node | None:
    """Open one level of anything JAX knows as a pytree node, and a typed random key into its data."""
    jax = sys.modules.get("jax")
    if jax is None:
        return None
    if isinstance(tree, jax.Array) and jax.dtypes.issubdtype(tree.dtype, jax.dtypes.prng_key):
        kind = jax.random.key_impl(tree)
        return Node(
            [KEY_DATA],
            [jax.random.key_data(tree)],
            lambda v: jax.random.wrap_key_data(v[0], impl=kind),
            str(kind),
        )
    if jax.tree_util.all_leaves([tree]):
        return None
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    _, static = structure.node_data()
    return Node(
        [jax.tree_util.keystr(path) for path, _ in pairs],
        [child for _, child in pairs],
        structure.unflatten,
        static,
    )


def expand_torch(tree: Any) -> Node | None:
    """Open a module into its parameters and buffers, and an optimizer into state and options."""
    if is_a(tree, "torch.nn", "Module"):
        named = [*tree.named_parameters(), *tree.named_buffers()]
        return Node([f".{name}" for name, _ in named], [tensor for _, tensor in named], lambda _: tree)
    return _open_optimizer(tree) if is_a(tree, "torch.optim", "Optimizer") else None


def _open_optimizer(optimizer: Any) -> Node:
    """State by parameter number as in `state_dict`, and the groups' options. Parameters are the model's."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {i: optimizer.state[p] for i, p in enumerate(parameters) if p in optimizer.state}
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]

    def write_back(values: list[Any]) -> Any:
        for i, new in values[0].items():
            optimizer.state[parameters[i]].update(new)
        for group, options in zip(optimizer.param_groups, values[1], strict=True):
            group.update(options)
        settings = getattr(optimizer, "_samestep_settings", None)
        if settings is not None:
            settings.forget()
        return optimizer

    return Node([".state", ".param_groups"], [state, groups], write_back)

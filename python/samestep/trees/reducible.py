"""What a reduction does with each leaf of a tree: it reduces it, returns it as it is, or refuses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from samestep import _core, arrays
from samestep.errors import InvalidArgumentError
from samestep.group.compiled import NO_SUM_OF_KEYS
from samestep.group.group import Group
from samestep.trees import signature
from samestep.trees.identity import is_array, is_flag, is_number, passes
from samestep.trees.structure import DEEPEST, KEY_DATA, fields_of

_INT_BITS = 64


def is_reduced_number(leaf: Any) -> bool:
    """A number with a dtype. Flags and members of enumerations are returned as they are."""
    if type(leaf) is int:
        return leaf.bit_length() <= _INT_BITS
    if isinstance(leaf, np.generic):
        return not isinstance(leaf, (np.bool_, np.flexible, np.object_, np.datetime64, np.timedelta64))
    return type(leaf) in (float, complex)


def flag_text(flag: Any) -> str:
    """What a flag is, which must be the same on all ranks."""
    return f"the flag {bool(flag)}"


def describe_leaves(
    names: Sequence[str],
    leaves: Sequence[Any],
    act: str,
    backend: Group | None = None,
    *,
    waiting: Group | None = None,
) -> tuple[list[Any], list[int], signature.LeafTable]:
    """Look at all leaves once, for a reduction; arguments and errors as for `signature.describe_leaves`.

    Returns:
      The leaves with numbers as arrays; which of them are numbers; and the table. Its kinds say which leaves are
      refused, and which value a flag has: one that differs between ranks was meant to be reduced.
    """
    values = list(leaves)
    numbers = [i for i, leaf in enumerate(leaves) if type(leaf) is not np.ndarray and is_reduced_number(leaf)]
    for i in numbers:
        values[i] = np.asarray(leaves[i])
    looks = signature.describe_leaves(names, values, act, backend, waiting=waiting)
    refusals = {}
    for i, info in enumerate(looks.infos):
        if info is None and leaves[i] is not None:
            if is_flag(leaves[i]):
                looks.kinds[i] = flag_text(leaves[i])
            elif why := looks.problems.get(i) or why_refused(
                leaves[i], is_whole=len(names) == 1 and not names[0]
            ):
                refusals[i] = why
    if KEY_DATA in "\0".join(names):  # a loop would be felt
        refusals |= {i: NO_SUM_OF_KEYS for i, name in enumerate(names) if name.endswith(KEY_DATA)}
    kinds = signature.with_refusals(looks.kinds, refusals) if refusals else looks.kinds
    return values, numbers, looks._replace(kinds=kinds)


def why_refused(leaf: Any, *, is_whole: bool = False) -> str | None:
    """Why a reduction does not take a leaf that is neither an array nor None, and what to do; None if it returns it.

    `is_whole`: it is the whole tree.

    Example:
      >>> why_refused("relu")
      >>> why_refused(1 << 70)
      'an int that does not fit 64 bits; pass a float, or send it with allgather_object'
    """
    if passes(leaf) and (not is_whole or arrays.is_float0(leaf)):
        return None
    name = type(leaf).__name__
    if type(leaf) is int:
        return "an int that does not fit 64 bits; pass a float, or send it with allgather_object"
    if isinstance(leaf, np.ndarray):
        return _why_not_sent(leaf)
    if is_number(leaf):
        return f"a {name}, which no reduction takes; pass a float or an int, or send it with allgather_object"
    if isinstance(leaf, (Mapping, Sequence)) or fields_of(leaf) is not None:
        why = (
            "that cannot be built again with other leaves, has arrays in other attributes, has keys that are not named "
            f"alike on all ranks, or is more than {DEEPEST} containers deep; pass a dict with keys of str, or a list"
        )
    elif is_whole:
        why = (
            "is not a tree of arrays; pass a dict, list, tuple or dataclass (a generator must become a list)"
        )
    else:
        why = (
            "in which no arrays can be seen; pass its arrays in a dict, register its class with JAX, or take it out of "
            "the tree"
        )
    return f"a {name} {why}"


def _why_not_sent(leaf: Any) -> str | None:
    try:
        _core.view_info(leaf)
    except InvalidArgumentError as error:
        return str(error)
    return None


def refuse_others(names: Sequence[str], leaves: Sequence[Any], act: str) -> None:
    """If JAX traces the caller, raise InvalidArgumentError for the first leaf that is refused. No communication."""
    for name, leaf in zip(names, leaves, strict=True):
        if leaf is None or arrays.is_jax(leaf) or is_reduced_number(leaf):
            continue
        why = why_refused(leaf) if passes(leaf) or not is_array(leaf) else _why_not_sent(leaf)
        if why is not None:
            raise InvalidArgumentError(f"{act}: {signature.leaf_text(name)}: {why}")

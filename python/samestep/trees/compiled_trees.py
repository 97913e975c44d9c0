"""Collectives on trees in functions that JAX traces: one call of the compiled program for all leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from samestep import arrays
from samestep.errors import InvalidArgumentError
from samestep.group import compiled
from samestep.group.compiled_collective import Collective
from samestep.group.group import Group
from samestep.trees import Flat, signature
from samestep.trees.facts import NO_FACTS, Facts, refused_texts, text_of_bytes
from samestep.trees.identity import is_flag, passes
from samestep.trees.reducible import flag_text


def call(
    backend: Group,
    flat: Flat,
    is_number: Callable[[Any], bool],
    verb: str,
    act: str,
    *,
    timeout: float | None,
    facts: Facts = NO_FACTS,
    **details: Any,
) -> Any:
    """Add a collective on the leaves of a tree to the program that JAX is tracing; its results, as tracers in a tree.

    Args:
      flat: the tree; tracers, arrays and numbers among the leaves.
      is_number: which leaves are communicated separately from arrays; the others are passed through.
      verb: one that keeps shapes.
      timeout: seconds that the call may take when the program runs.
      facts: what must be equal on all ranks as well.
      details: more fields of `Collective`.
    """
    results = list(flat.leaves)
    moved = [
        i
        for i, leaf in enumerate(results)
        if not arrays.is_float0(leaf)
        and (arrays.is_jax(leaf) or is_number(leaf) or (arrays.is_array(leaf) and not passes(leaf)))
    ]
    if moved:
        leaves = [flat.leaves[i] for i in moved]
        facts = facts.with_texts(
            [(f"leaf {flat.names[i]}", kind) for i in moved if (kind := _key_kind(results[i]))]
        )
        if cut := {i: why for i in moved if (why := _why_cut(results[i]))}:
            leaves = [np.zeros(np.shape(flat.leaves[i])) if i in cut else flat.leaves[i] for i in moved]
            facts = facts.with_texts(refused_texts(flat, cut, backend.rank))
            if backend.size == 1:
                raise InvalidArgumentError(f"{act}: leaf {flat.names[min(cut)]} is {cut[min(cut)]}")
        collective = Collective(
            compiled.group_of(backend),
            verb,
            act,
            timeout=backend._seconds(timeout),
            names=tuple(flat.names[i] for i in moved),
            flags=tuple(
                (flat.names[i], flag_text(leaf))
                for i, leaf in enumerate(results)
                if is_flag(leaf) and i not in moved
            ),
            facts=facts.texts,
            compared=tuple(name for name, _ in facts.traced),
            cure=facts.cure,
            explain=_explain,
            **details,
        )
        made = compiled.call(collective, [*leaves, *(x for _, x in facts.traced)])
        for i, value in zip(moved, made, strict=True):
            results[i] = value
    return flat.rebuild(results)


def _key_kind(leaf: Any) -> str:
    """The type of a random key, whose bits mean nothing to another generator; "" for all else."""
    text = str(getattr(leaf, "dtype", ""))
    return text if text.startswith("key<") else ""


def _why_cut(leaf: Any) -> str:
    """Why a program cannot take a constant: JAX, unless 64 bits are enabled, would cut it; "" if it can."""
    from jax import dtypes

    if compiled.is_traced([leaf]) or _key_kind(leaf):
        return ""
    value = np.asarray(leaf)
    if value.dtype.kind not in "iufcO" or (kind := dtypes.canonicalize_dtype(value.dtype)) == value.dtype:
        return ""
    with np.errstate(all="ignore"):
        taken = value.astype(kind)
    if value.dtype.kind in "iu":
        is_right = np.array_equal(taken, value)
    else:
        is_right = value.dtype.kind in "fc" and np.array_equal(np.isfinite(taken), np.isfinite(value))
    cure = "to which jit cuts it; enable 64 bits (jax_enable_x64), or call outside"
    return "" if is_right else f"{value.dtype} that does not fit {kind}, {cure}"


def _explain(
    collective: Collective, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], data: Sequence[bytes]
) -> None:
    """Raise the MismatchError of ranks whose programs hold different trees. Collective."""
    group, flags, n = collective.group, collective.flags, len(collective.names)
    kinds = [signature.kind_of_array(dtypes[i], shapes[i]) for i in range(n)]
    texts = map(text_of_bytes, data, dtypes[n:], shapes[n:])
    facts = (*collective.facts, *zip(collective.compared, texts, strict=True))
    kinds += [what for _, what in flags]
    names = [*collective.names, *(name for name, _ in flags)]
    by = signature.Comparison(Facts(facts, cure=collective.cure))
    signature.compare(group, signature.Description.of(collective.act, names, kinds), compared=True, by=by)

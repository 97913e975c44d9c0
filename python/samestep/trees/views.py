"""Leaves that are views of one array, as ranks compare them and as operations treat them."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.arrays import overlaps
from samestep.arrays.overlaps import Place
from samestep.errors import InvalidArgumentError
from samestep.trees.signature import ABSENT, VIEW, Description, LeafTable, leaf_text

_PART = "in the memory of "
_FOLDED = "overlapping itself "


def join_views(names: Sequence[str], looks: LeafTable, *, reads: bool) -> tuple[int, int] | None:
    """Make views of the same elements one array in `looks`, and say in its kinds how leaves share memory.

    A transposed weight is such a view. Kinds contain where it lies in the other one, so that ranks on which that
    differs get a MismatchError when they compare.

    Args:
      names, looks: of the leaves.
      reads: whether leaves that cannot be written are read while others are written.

    Returns:
      Two leaves that share memory but not all elements, and of which one is written; twice the same leaf if it is
      written and its own elements share memory. None if there are none.
    """
    clash = folded = None
    for group in looks.shared:
        first: dict[object, Place] = {}
        apart = []
        for one in group:
            if not one.written:
                if reads:
                    # It becomes a new array, so it may well stand in two places.
                    looks.aliases[one.leaf] = one.leaf
                    apart.append(one)
                continue
            if one.folded:
                folded = folded or (one.leaf, one.leaf)
                looks.kinds[one.leaf] = f"{_FOLDED}with strides {one.strides}: {looks.kinds[one.leaf]}"
                continue
            same = first.setdefault(one.elements, one)
            if same is one:
                apart.append(one)
            elif (same.address, same.strides) != (one.address, one.strides):
                looks.aliases[one.leaf] = same.leaf
                looks.kinds[one.leaf] = f"{VIEW}{_where(names, one, same)}: {looks.kinds[one.leaf]}"
        found = overlaps.find_clash(apart) if len(apart) > 1 and first else None
        if found is not None:
            clash = clash or found
            for one in apart[1:]:
                looks.kinds[one.leaf] = f"{_PART}{_where(names, one, apart[0])}: {looks.kinds[one.leaf]}"
    return folded or clash


def _where(names: Sequence[str], one: Place, other: Place) -> str:
    offset = one.address - other.address
    return (
        f"{leaf_text(names[other.leaf])} at byte {offset} with strides {one.strides} (there {other.strides})"
    )


def refuse_clash(
    group: str, mine: Description, everyone: Sequence[Description] | None, clash: tuple[int, int] | None
) -> None:
    """Refuse what `join_views` found on any rank. To be called on all ranks, when they have compared kinds.

    Raises:
      InvalidArgumentError: on all ranks; names the leaves.
    """
    text = ""
    if clash is not None and clash[0] == clash[1]:
        leaf = leaf_text(mine.names[clash[0]])
        text = f"elements of {leaf} share memory, as after expand or broadcast_to; pass a copy"
    elif clash is not None:
        one, other = (leaf_text(mine.names[i]) for i in clash)
        memory = "device memory" if " device" in mine.kinds[clash[1]] else "memory"
        text = (
            f"{one} and {other} share {memory} without being views of the same elements; pass a copy of one"
        )
    for rank, entry in enumerate(everyone or ()):
        for i, kind in enumerate(entry.kinds):
            is_view = kind.startswith(VIEW) and any(other.kinds[i] == ABSENT for other in everyone or ())
            if not text and (is_view or kind.startswith((_PART, _FOLDED))):
                text = f"on rank {rank} {leaf_text(entry.names[i])} is {kind}; pass a copy of it"
    if text:
        raise InvalidArgumentError(f"{mine.act} in group {group}: {text}")

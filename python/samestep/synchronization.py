"""Everybody gets what root has: parameters, states, optimizer states, any tree."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from samestep import agreement, trees
from samestep.errors import InvalidArgumentError
from samestep.fusion import Timer, bcast_leaves, fused, timer
from samestep.verbs import require_backend

if TYPE_CHECKING:
    from samestep.arrays import ArrayInfo
    from samestep.backend import Backend


def synchronize(
    backend: Backend, tree: Any, *, root: int = 0, objects: str = "keep", timeout: float | None = None
) -> Any:
    """Broadcast every leaf of `tree` from rank `root`. Collective.

    Arrays that can be written are written in place; the others (JAX, read-only NumPy) are replaced. Python
    and NumPy numbers become root's. None stays None. Leaves that are one array stay one array. A torch
    module or optimizer is written in place and returned itself. Small leaves share messages: 200 leaves of
    10 kB cost eight operations at most.

    Args:
      backend: the group.
      tree: dicts, lists, tuples, dataclasses, torch modules and optimizers, JAX-registered nodes, of the
        same structure, shapes and dtypes on all ranks.
      root: rank whose values count.
      objects: what to do with leaves that are neither arrays nor numbers, e.g. strings: "keep" each rank's
        own and warn once, naming them, or "pickle" to send root's.
      timeout: seconds for all of it; None for the backend's own limit.

    Returns:
      A tree of the same containers with root's values.

    Raises:
      MismatchError: on all ranks, if the trees differ; names the first leaf that does. Nothing has changed.
      InvalidArgumentError: `root` is no rank of the group, `objects` is another word, or `tree` is a generator.

    Example:
      >>> import numpy as np, samestep as ss
      >>> backend = ss.initialize()
      >>> params = {"weight": np.ones((2, 2)), "step": 3}
      >>> ss.synchronize(backend, params)["step"]
      3
    """
    require_backend("synchronize", backend)
    root = backend._rank_number(root, "synchronize", "root")
    if not 0 <= root < backend.size:
        raise InvalidArgumentError(
            f"synchronize in group {backend.name}: root {root} is outside [0, {backend.size})"
        )
    if objects not in ("keep", "pickle"):
        raise InvalidArgumentError(f"synchronize: objects must be 'keep' or 'pickle', got {objects!r}")
    if isinstance(tree, Iterator):  # model.parameters(), say: it would be left as it is
        raise InvalidArgumentError(
            f"synchronize: {type(tree).__name__} is no tree of arrays; pass the module or a dict, or make it a list"
        )
    left = timer(timeout)
    act = f"synchronize(root={root}, objects={objects!r})"
    plain, compared = agreement.plain(backend, tree, act, left())
    if plain is not None:
        fused(backend).broadcast(plain, root, backend._seconds(left()))
        return plain.copy()
    flat = trees.flatten(tree)
    whats, infos, places = agreement.look_at(flat.names, flat.leaves)
    mine = agreement.Description(act, flat.names, whats, places)
    everyone = agreement.everyones(backend, mine, left, compared=compared)
    if everyone is not None:
        places = _common_places(backend, everyone, infos, root=root, left=left)

    results = list(flat.leaves)
    sent = (agreement.NUMBER,) if objects == "keep" else (agreement.NUMBER, agreement.OBJECT)
    _send_objects(backend, results, [i for i, what in enumerate(whats) if what in sent], root=root, left=left)
    moved = [(i, info) for i, info in enumerate(infos) if info is not None and places[i] == i]
    leaves = [results[i] for i, _ in moved]
    received = bcast_leaves(backend, leaves, [info for _, info in moved], root=root, timeout=left())
    for (i, _), value in zip(moved, received, strict=True):
        results[i] = value
    if objects == "keep":
        _warn_about([name for name, what in zip(flat.names, whats, strict=True) if what == agreement.OBJECT])
    return flat.rebuild(results[place] for place in places)


def _send_objects(backend: Backend, values: list[Any], which: list[int], *, root: int, left: Timer) -> None:
    if which:
        mine = [values[i] for i in which] if backend.rank == root else None
        for i, value in zip(which, backend.bcast_object(mine, root=root, timeout=left()), strict=True):
            values[i] = value


def _common_places(
    backend: Backend,
    everyone: list[agreement.Description],
    infos: list[ArrayInfo | None],
    *,
    root: int,
    left: Timer,
) -> list[int]:
    """Which leaves are one array, by root's word.

    Ranks may differ in that where arrays are replaced anyway, e.g. after root alone has loaded a checkpoint.
    Where they are written in place the difference is an error.
    """
    agreement.check_same(backend.name, everyone, places=False)
    roots, mine = everyone[root].places, everyone[backend.rank].places
    bad = any(info and info.writable and p != q for info, p, q in zip(infos, roots, mine, strict=True))
    if any(backend.allgather_object(bad, timeout=left())):
        agreement.check_same(backend.name, everyone)
    return roots


def _warn_about(names: list[str]) -> None:
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warnings.warn(
            f"synchronize: neither array nor number, so left as on each rank: {shown}; "
            "objects='pickle' sends root's, or take these leaves out of the tree",
            stacklevel=_levels_to_caller(),
        )


def _levels_to_caller() -> int:
    """How many frames lie between `_warn_about` and the first that is not ours."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "samestep":
        frame, levels = frame.f_back, levels + 1
    return levels

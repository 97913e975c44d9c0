"""Makes any tree equal to root's: parameters, states, optimizer states."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

from samestep import _core, trees
from samestep._util.json_layout import Many
from samestep._util.loaded import is_a
from samestep.arrays import ArrayInfo
from samestep.errors import InvalidArgumentError
from samestep.group import compiled
from samestep.group.backend_argument import takes_backend
from samestep.group.group import Group
from samestep.trees import compiled_trees, reducible, scalars, signature
from samestep.trees.divided import refusals
from samestep.trees.facts import Facts, refused_texts, static_texts
from samestep.trees.fusion import Timer, bcast_leaves, fused, timer
from samestep.trees.identity import identity_of, is_array, is_number, parts_of

_Tree = TypeVar("_Tree")


@takes_backend
def synchronize(
    backend: Group,
    tree: _Tree,
    *,
    root: int = 0,
    objects: Literal["keep", "pickle"] = "keep",
    timeout: float | None = None,
) -> _Tree:
    """Broadcast every leaf of `tree` from rank `root`. Collective.

    Arrays that can be written are written in place; the others (JAX, read-only NumPy) are replaced. Python
    and NumPy numbers become root's. None stays None. Leaves that are one array stay one array. A torch
    module or optimizer is written in place and returned itself. Small leaves share messages: 200 leaves of
    10 kB cost eight operations at most.

    Args:
      backend: the group.
      tree: dicts, lists, tuples, dataclasses and other containers that can be built again, torch modules and
        optimizers, JAX-registered nodes, of the same structure, shapes and dtypes on all ranks.
      root: rank whose values count.
      objects: what to do with leaves that are neither arrays nor numbers: "keep" each rank's own, or
        "pickle" to send root's. "keep" warns once and names those that may differ: functions of the same
        name and equal strings do not.
      timeout: seconds for all of it; None for the backend's own limit.

    Returns:
      A tree of the same containers with root's values.

    Raises:
      MismatchError: on all ranks, if the trees differ; names the first leaf that does. Nothing has changed.
      InvalidArgumentError: `root` is not a rank of the group, `objects` is another word, or `tree` is a generator. On
        all ranks, if `objects` is "keep", and elements of an array cannot be sent or a container of arrays cannot be
        built again; names the leaf.

    Example:
      >>> import numpy as np, samestep as ss
      >>> backend = ss.initialize()
      >>> params = {"weight": np.ones((2, 2)), "step": 3}
      >>> ss.synchronize(backend, params)["step"]
      3
    """
    root = backend._rank_number(root, "synchronize", "root")
    if not 0 <= root < backend.size:
        raise InvalidArgumentError(
            f"synchronize in group {backend.name}: root {root} is outside [0, {backend.size})"
        )
    if objects not in ("keep", "pickle"):
        raise InvalidArgumentError(f"synchronize: objects must be 'keep' or 'pickle', got {objects!r}")
    if isinstance(tree, Iterator):  # model.parameters(), say: it would be left as it is
        raise InvalidArgumentError(
            f"synchronize: {type(tree).__name__} is not a tree of arrays; pass the module or a dict, or make it a list"
        )
    left = timer(timeout)
    act = f"synchronize(root={root}, objects={objects!r})"
    with _core.UserCall(act):
        result: _Tree = _synchronize(backend, tree, act, root=root, objects=objects, left=left)
    return result


def _synchronize(backend: Group, tree: Any, act: str, *, root: int, objects: str, left: Timer) -> Any:
    divided = refusals(tree)
    fast, compared = (None, False) if divided else signature.try_fast_tree(backend, tree, act, left())
    if fast is not None:
        fused(backend).bcast(fast, root, backend._seconds(left()))
        return fast.copy()
    flat = trees.flatten(tree)
    facts = Facts(tuple(static_texts(flat)))
    if compiled.is_traced(flat.leaves):
        facts = facts.with_texts(refused_texts(flat, divided, backend.rank))
        return compiled_trees.call(
            backend, flat, is_number, "bcast", act, root=root, timeout=left(), facts=facts
        )
    if is_a(tree, "torch.nn", "Module"):  # where DistributedOptimizer looks for what no optimizer has
        backend._cache.setdefault("modules", weakref.WeakSet()).add(tree)
    looks = signature.describe_leaves(flat.names, flat.leaves, act, backend, waiting=backend)
    clash = signature.join_views(flat.names, looks, reads=False)
    kinds, infos, aliases = looks.kinds, looks.infos, looks.aliases
    if objects == "keep":
        divided = _closed_containers(flat.leaves, kinds) | looks.problems | divided
    if divided:
        kinds = signature.with_refusals(kinds, divided)
    mine = signature.Description(act, flat.names, kinds, aliases)
    by = signature.Comparison(facts)
    everyone = signature.compare(backend, mine, left, compared=compared, by=by, aliases=False)
    if everyone is not None:
        aliases = _common_aliases(backend, everyone, infos, root=root, left=left)
    # In host memory shared elements get the same bytes twice, as all ranks share the same ones.
    if clash is not None and (clash[0] == clash[1] or getattr(infos[clash[0]], "device", "cpu") != "cpu"):
        signature.refuse_clash(backend.name, mine, everyone, clash)

    results = list(flat.leaves)
    sent = (signature.NUMBER,) if objects == "keep" else (signature.NUMBER, signature.OBJECT)
    _send_objects(backend, results, [i for i, what in enumerate(kinds) if what in sent], root=root, left=left)
    call = functools.partial(bcast_leaves, backend, root=root, left=left)
    looks = looks._replace(kinds=kinds, aliases=aliases)
    results = signature.in_each_array(call, flat.names, results, looks)
    if objects == "keep":
        _warn_about_objects(
            backend, flat, [i for i, what in enumerate(kinds) if what == signature.OBJECT], left
        )
    return flat.rebuild(results)


def _closed_containers(leaves: list[Any], kinds: list[str]) -> dict[int, str]:
    """Which leaves are containers of arrays that cannot be opened, and what to do."""
    objects = [i for i, what in enumerate(kinds) if what == signature.OBJECT]
    found = {i: reducible.why_refused(leaves[i]) for i in objects if any(map(is_array, parts_of(leaves[i])))}
    return {i: why for i, why in found.items() if why is not None}  # else arrays of texts, and the like


def _send_objects(backend: Group, values: list[Any], which: list[int], *, root: int, left: Timer) -> None:
    if which:
        mine = [scalars.encode(values[i]) for i in which] if backend.rank == root else []
        received = backend._bcast_facts(mine, Many(scalars.LAYOUT), root, left())
        others = [i for i, words in zip(which, received, strict=True) if words is None]
        for i, words in zip(which, received, strict=True):
            values[i] = values[i] if words is None else scalars.decode(words)
        if others:
            objects = [values[i] for i in others] if backend.rank == root else None
            found = backend.bcast_object(objects, root=root, timeout=left())
            for i, value in zip(others, found, strict=True):
                values[i] = value


def _common_aliases(
    backend: Group,
    everyone: list[signature.Description],
    infos: list[ArrayInfo | None],
    *,
    root: int,
    left: Timer,
) -> list[int]:
    """Which leaves are one array, by root's word.

    Ranks may differ in that where arrays are replaced anyway, e.g. after root alone has loaded a checkpoint.
    Where they are written in place the difference is an error.
    """
    roots, mine = everyone[root].aliases, everyone[backend.rank].aliases
    bad = any(info and info.writable and p != q for info, p, q in zip(infos, roots, mine, strict=True))
    if any(backend._allgather_facts(bad, bool, left())):
        signature.check_same(backend.name, everyone)
    return roots


def _warn_about_objects(backend: Group, flat: trees.Flat, which: list[int], left: Timer) -> None:
    """Warn about objects that may differ from rank to rank. Collective if there are any."""
    if not which:
        return
    mine = [identity_of(flat.leaves[i]) for i in which]
    everyone = backend._allgather_facts(mine, Many((str, None)), left())
    kept = [i for i, *texts in zip(which, *everyone, strict=True) if None in texts or len(set(texts)) > 1]
    if not kept:
        return
    if flat.names == [""]:
        kind = type(flat.leaves[0])
        text = (
            f"{kind.__module__}.{kind.__qualname__} is not a tree of arrays, so nothing was synchronized; pass its "
            "arrays, for example in a dict, or objects='pickle', which returns a copy of root's"
        )
    else:
        named = [f"{flat.names[i]} ({type(flat.leaves[i]).__name__})" for i in kept]
        shown = ", ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else "")
        text = (
            f"neither array nor number, so left as on each rank: {shown}; "
            "objects='pickle' sends root's, or take these leaves out of the tree"
        )
    warnings.warn(f"synchronize: {text}", stacklevel=_frames_to_caller())


def _frames_to_caller() -> int:
    """How many frames lie between `_warn_about_objects` and the first that is not ours."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "samestep":
        frame, levels = frame.f_back, levels + 1
    return levels

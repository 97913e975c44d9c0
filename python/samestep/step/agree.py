"""What ranks tell each other before the data of a step, and decisions with the same result on all ranks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from samestep import _core, arrays, trees
from samestep._util.json_layout import Many
from samestep._util.loaded import is_a
from samestep._util.text import by_rank, error_line, ranks_text
from samestep.errors import InvalidArgumentError, MismatchError
from samestep.group.group import Group
from samestep.step.leaves import Layout, LeafSpec, gradients_of
from samestep.trees import signature
from samestep.trees.fusion import Timer, timer
from samestep.trees.identity import is_array, is_number, passes

_N_WORDS = 4  # before the weights

NO_OPINION = 0
ALL_PRESENT = 1


class Header(NamedTuple):
    """The description of one rank's part of a step."""

    digest: int
    """Of the tree; 0 on a rank that has seen none."""
    present: int
    """Which leaves had an array: a hash, or one of the numbers above."""
    problem: int
    """Whether something is wrong on this rank, which the ranks then tell each other."""
    weights: list[float]
    """Of its nodes, in order."""


class StepHeaders:
    """Exchanges headers, step after step, in the same memory. `n_weights`: the largest number of nodes of a rank."""

    def __init__(self, backend: Group, n_weights: int) -> None:
        self._backend = backend
        self._row = np.zeros(_N_WORDS + n_weights, np.uint64)
        self._weights = self._row[_N_WORDS:].view(np.float64)
        self._table = np.zeros((backend.size, len(self._row)), np.uint64)
        self._table_weights = self._table[:, _N_WORDS:].view(np.float64)

    def exchange(self, mine: Header, left: Timer) -> list[Header]:
        """The headers of all ranks, in order. Collective."""
        n_weights = len(mine.weights)
        self._row[:_N_WORDS] = mine.digest, mine.present, mine.problem, n_weights
        self._weights[:n_weights] = mine.weights
        self._backend.allgather(self._row, out=self._table, timeout=left())
        rows = zip(self._table[:, :_N_WORDS].tolist(), self._table_weights.tolist(), strict=True)
        return [
            Header(digest, present, problem, weights[:count])
            for (digest, present, problem, count), weights in rows
        ]


class Tree(NamedTuple):
    """The containers and leaves of the trees that are added."""

    layout: Layout
    rebuild: Callable[[list[Any]], Any]
    examples: list[Any]
    """By leaf: what is passed through, a number of the type to return, or `arrays.sharding_of` an array."""


def header_of_present(present: int, tree: Tree | None) -> int:
    """`Header.present` for the leaves of a rank: a bit mask, equal for equal leaves."""
    if tree is None or present == 0:
        return NO_OPINION
    if present == tree.layout.present:
        return ALL_PRESENT
    return 2 + (signature.digest_of(f"{present:x}") >> 8)


def require_like(layout: Layout, names: list[str], specs: list[LeafSpec]) -> None:
    """Raise InvalidArgumentError, for the first leaf that differs, unless a tree has the leaves of the earlier ones.

    A leaf that is None in one may be an array in the other.
    """
    if names != layout.names:
        differing = set(names) ^ set(layout.names)
        name = next((name for name in [*names, *layout.names] if name in differing), "")
        raise InvalidArgumentError(
            f"Accumulator.add: the leaves are not those of the trees before, see {signature.leaf_text(name)}"
        )
    for name, old, new in zip(names, layout.specs, specs, strict=True):
        if old.what != new.what and signature.ABSENT not in (old.what, new.what):
            raise InvalidArgumentError(
                f"Accumulator.add: {signature.leaf_text(name)} is {new.what} and was {old.what} before"
            )


def agree_on_count(backend: Group, n_shards: int, left: Timer) -> None:
    """Raise MismatchError, on all ranks, unless they divide a step into the same number of shards. Collective."""
    everyone = [str(count) for count in backend._allgather_facts(n_shards, int, left())]
    if len(set(everyone)) > 1:
        raise MismatchError(f"Accumulator in group {backend.name}: shards is {by_rank(everyone)}")


def agree_on_tree(backend: Group, mine: Tree | None, act: str, left: Timer) -> Tree:
    """The common tree of all ranks, also for ranks that have seen none. A leaf may be None here and an array elsewhere.

    Collective; called only if the headers differ.

    Raises:
      MismatchError: the trees differ, on all ranks; names the first leaf that does.
    """
    fact = None
    if mine is not None:
        fact = [mine.layout.names, mine.layout.specs]
    row = [str, str, str, Many(int), bool, Many(int)]
    everyone = backend._allgather_facts(fact, ([Many(str), Many(row)], None), left())
    holders = [rank for rank, entry in enumerate(everyone) if entry is not None]
    names, first = everyone[holders[0]]
    # Ranks without a tree count as the first one that has one, so that all raise the same error.
    told = (entry or (names, first) for entry in everyone)
    described = [signature.Description.of(act, theirs, [row[0] for row in rows]) for theirs, rows in told]
    signature.check_same(backend.name, described, absent_is_fine=True)
    layout = Layout(names, list(map(_spec, first)))
    for rank in holders[1:]:
        layout = layout.with_absent_from(list(map(_spec, everyone[rank][1])))
    if len(holders) < backend.size:
        mine = _share_containers(backend, mine, holders[0], act, left())
    assert mine is not None
    return mine._replace(layout=layout)


def _spec(row: list[Any]) -> LeafSpec:
    what, library, dtype, shape, is_number, order = row
    return LeafSpec(what, library, dtype, tuple(shape), is_number, tuple(order))


def _share_containers(backend: Group, mine: Tree | None, root: int, act: str, timeout: float | None) -> Tree:
    """Send the containers to ranks that have none."""
    import pickle

    sent = None
    if backend.rank == root and mine is not None:
        values = [
            i if spec.group else example
            for i, (spec, example) in enumerate(zip(mine.layout.specs, mine.examples, strict=True))
        ]
        try:
            unplaced = [
                None if spec.group and not spec.is_number else example
                for spec, example in zip(mine.layout.specs, mine.examples, strict=True)
            ]
            sent = pickle.dumps((mine.rebuild(values), unplaced))
        except Exception as error:
            sent = b"!" + error_line(error).encode()
    received = backend.bcast_object(sent, root=root, timeout=timeout)
    if received[:1] == b"!":
        raise InvalidArgumentError(
            f"{act} in group {backend.name}: a rank adds no shards and cannot be sent the tree's structure "
            f"({received[1:].decode()}); pass like= to Accumulator on all ranks"
        )
    if mine is not None:
        return mine
    containers, examples = pickle.loads(received)
    flat = trees.flatten(containers)
    return Tree(Layout([], []), flat.rebuild, examples)


def union_of_present(backend: Group, headers: list[Header], mine: int, tree: Tree, left: Timer) -> int:
    """The leaves of which any rank has an array, as a bit mask. Collective if ranks differ."""
    opinions = {header.present for header in headers} - {NO_OPINION}
    if opinions == {ALL_PRESENT}:
        return tree.layout.present
    if len(opinions) == 1 and all(header.present for header in headers):
        return mine
    n_leaves = len(tree.layout.specs)
    rows = backend._allgather_facts([i for i in range(n_leaves) if mine >> i & 1], Many(int), left())
    return sum(1 << i for i in {i for row in rows for i in row})


def require_same_order(backend: Group, timeout: float | None = None) -> None:
    """Compare what those that draw data for this group say of it, those that have begun on each rank. Collective.

    They cannot do so themselves: which calls of a loader are made on all ranks, and when, is not known there. A rank
    may draw less than another: it reads other data, say, or the other one alone has looked at the validation data.

    Raises:
      MismatchError: on all ranks, if ranks draw from other numbers of items or other seeds, or in other modes.
    """
    if backend.size == 1:
        return
    told = {follower.order_text() for follower in list(backend._changed) if hasattr(follower, "order_text")}
    found = list(map(set, backend._allgather_facts(sorted(told - {""}), Many(str), timeout)))
    if set.union(*found) in found:
        return
    common = set.intersection(*filter(None, found))
    ranks: dict[str, list[int]] = {}
    for rank, mine in enumerate(found):
        if mine - common:
            ranks.setdefault(" and ".join(sorted(mine - common)), []).append(rank)
    listed = "; ".join(f"{ranks_text(of)}: {text}" for text, of in ranks.items())
    raise MismatchError(
        "DistributedSampler: the ranks draw from different orders, so that together they do not visit each item "
        f"once; give all of them the whole data and the same seed. {listed}"
    )


_WHOLE = ("int", "uint", "bool")


def any_rank(backend: Group, flag: object, act: str, timeout: float | None) -> bool:
    """Whether `flag` is true on any rank. Collective; `act`: the user's call."""
    mine = np.array([bool(flag)], np.int64)
    with _core.UserCall(act):
        return bool(backend.allreduce(mine, "max", timeout=timeout)[0])


def all_finite(backend: Group, tree: Any, timeout: float | None) -> bool:
    """See `Backend.all_finite`."""
    act = "all_finite()"
    flat = trees.flatten(gradients_of(tree))
    finite = [_is_finite(leaf) for leaf in flat.leaves]
    why = "in which no numbers can be seen; pass its arrays in a dict, or take it out of the tree"
    unknown = {
        i: f"a {type(flat.leaves[i]).__name__} {why}" for i, known in enumerate(finite) if known is None
    }
    mine = np.array([2 if unknown else not all(finite)], np.int64)
    left = timer(timeout)
    with _core.UserCall(act):
        worst = int(backend.allreduce(mine, "max", timeout=left())[0])
        if worst < 2:
            return worst == 0
        kinds = signature.with_refusals([""] * len(finite), unknown)
        found = backend._allgather_facts([flat.names, kinds], [Many(str), Many(str)], left())
        signature.raise_refused(backend.name, [signature.Description.of(act, *rows) for rows in found])
    raise AssertionError  # a rank has counted one


def _is_finite(leaf: Any) -> bool | None:
    """Whether all numbers of a leaf are finite; None if they cannot be seen."""
    if isinstance(leaf, (np.ndarray, np.generic)) and not arrays.is_float0(leaf):
        kind = leaf.dtype.char
        return None if kind in "OV" else kind in "SUT" or bool(np.isfinite(leaf).all())
    if isinstance(leaf, (float, complex)):
        return bool(np.isfinite(leaf))
    if passes(leaf) or isinstance(leaf, numbers.Rational):
        return True
    try:
        if not is_array(leaf):
            return math.isfinite(leaf) if is_number(leaf) else None
        return _array_is_finite(leaf)
    except (InvalidArgumentError, TypeError, ValueError):
        return None


def _array_is_finite(leaf: Any) -> bool:
    info = arrays.info(leaf)
    if info.dtype.startswith(_WHOLE):
        return True
    if is_a(leaf, "torch", "Tensor"):
        wide = leaf.float() if info.dtype.startswith("float8") else leaf  # of which torch does not know it
        return bool(wide.isfinite().all())
    if info.device != "cpu":
        copy = np.empty(info.shape, info.dtype)
        _core.pack([leaf], copy)
        leaf = copy
    return bool(np.isfinite(np.asarray(leaf)).all())

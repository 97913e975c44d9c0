"""States that ranks divide, each with a copy of its neighbour's part, so that the loss of a rank loses nothing.

Rank r keeps its own part of a state, and that of rank r - 1, in a ring. After a change of the ranks those that are left
put the parts together, leaf by leaf, and divide them anew. If a rank is lost before all have done so, the others go by
the division before, which they keep until they have finished a step together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep import _core, arrays, trees
from samestep._util.json_layout import Many
from samestep._util.text import ranks_text
from samestep.errors import MismatchError, UnavailableError
from samestep.group.group import Group
from samestep.optimizer.flat_exchange import Partition, partition_of
from samestep.step.leaves import Flat
from samestep.trees.divided import maker


class _Division(NamedTuple):
    """What this rank holds of the states that some ranks have divided."""

    number: int
    """Of the division, higher for later ones; the same on all ranks."""
    members: Sequence[str]
    """Names of those ranks, in rank order."""
    parts: dict[str, Any]
    """By name of the state, the part of this rank."""
    copies: dict[str, Any]
    """That of the rank before it."""


class Copies:
    """The states of `ShardedOptimizer(copies=2)` among all parts of a training state, by name."""

    def __init__(self, backend: Group, parts: Mapping[str, Any]) -> None:
        self._backend = backend
        self._of: dict[str, Any] = {}
        for name, part in parts.items():
            if getattr(step := getattr(part, "_samestep_parts", None), "copies", 1) > 1:
                from samestep.optimizer.torch_copies import DividedByTorch

                self._of[name] = DividedByTorch(backend, step)
            elif (by := maker(part)) is not None:
                self._of[name] = _Divided(backend, by, part)
        self._members: Sequence[str] = ()
        self._number = 0
        self.held: dict[str, Any] = {}
        """The copies that this rank holds, which may be set to those of before."""
        self._before: _Division | None = None
        """An earlier division, which some ranks may not have got beyond."""

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def __bool__(self) -> bool:
        return bool(self._of)

    def prepare(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Parts for the ranks that there are, before the first step: other ranks may have been there at `init`.

        Raises UnavailableError for a state that `init` has not made.
        """
        return {name: state.made_for_now(parts[name]) for name, state in self._of.items()}

    def begin(self, parts: Mapping[str, Any], number: int, members: Sequence[str]) -> None:
        """Begin with parts that the members have made or read. Collective."""
        self._number, self._members, self._before = number, members, None
        self.renew(parts)

    def renew(self, parts: Mapping[str, Any]) -> None:
        """Pass the parts on to the next rank. Collective."""
        self.held = {name: state.passed_on(parts[name]) for name, state in self._of.items()}

    def settle(self) -> None:
        """All ranks have the division of now."""
        self._before = None

    def seen(self, name: str, part: Any) -> Any:
        """What has the `state_dict` of this rank's part, if `part` has one."""
        return self._of[name] if name in self._of and hasattr(part, "_samestep_parts") else part

    # ---- the state on other ranks

    def without_parts(self, values: dict[str, Any]) -> dict[str, Any]:
        """`values`, of the divided ones only what all ranks have alike: their leaves, None for parts."""
        return {**values, **{name: state.common(values[name]) for name, state in self._of.items()}}

    def with_parts(self, name: str, part: Any, common: Any) -> Any:
        """The reverse of it for one value, with this rank's part."""
        return self._of[name].with_common(part, common)

    def whole(self, values: dict[str, Any], root: int | None) -> dict[str, Any]:
        """`values`, with whole states on `root`, None elsewhere; None for all ranks. Collective."""
        return {**values, **{name: state.whole(values[name], root) for name, state in self._of.items()}}

    def divide(self, name: str, part: Any, whole: Any) -> Any:
        """This rank's part, like `part`, of a whole state, and the copy. No communication."""
        part, self.held[name] = self._of[name].divide(whole, part)
        return part

    def divide_anew(self, parts: Mapping[str, Any], number: int, members: Sequence[str]) -> dict[str, Any]:
        """This rank's parts after a change of the ranks, to `members`, from `parts` of before. Collective.

        `number`: higher than that of the last division, the same on all ranks.

        Raises:
          UnavailableError: on all ranks: two neighbours were lost at once.
        """
        if not self._of:
            return {}
        mine = {name: state.kept(parts[name]) for name, state in self._of.items()}
        now = _Division(self._number, self._members, mine, self.held)
        known = [division for division in (now, self._before) if division is not None and division.members]
        said = self._backend._allgather_facts(
            [[division.number, list(division.members)] for division in known], Many([int, Many(str)])
        )
        number_of, of, holders = _newest(said, members)
        chosen = next((division for division in known if division.number == number_of), None)
        made, copies, ends = {}, {}, {}
        for name, state in self._of.items():
            held = {} if chosen is None else state.held(chosen, of.index(members[self._backend.rank]), name)
            ends[name] = state.divided_anew(parts[name], held, holders)
        for name, end in ends.items():  # without communication: a loss until here has changed no state
            made[name], copies[name] = end()
        if chosen is not None and list(of) != list(members):
            self._before = chosen
        self._number, self._members, self.held = number, list(members), copies
        return made


def _newest(said: Sequence[Any], members: Sequence[str]) -> tuple[int, Sequence[str], list[int]]:
    """The newest division that is held whole: its number, its ranks, and by part the rank that has it or a copy. Pure.

    `said`: of each rank, number and members of the divisions that it holds; `members`: names of these ranks.

    Example:
      >>> _newest([[[1, ["a", "b", "c"]]], [[1, ["a", "b", "c"]]]], ["a", "c"])
      (1, ['a', 'b', 'c'], [0, 1, 1])
    """
    divisions = {number: names for theirs in said for number, names in theirs}
    why = "no rank has a part of the state"
    for number in sorted(divisions, reverse=True):
        names = divisions[number]
        rank_of = {
            name: rank
            for rank, (name, theirs) in enumerate(zip(members, said, strict=True))
            if any(number == one for one, _ in theirs)
        }
        following = [*names[1:], *names[:1]]
        found = [rank_of.get(name, rank_of.get(then)) for name, then in zip(names, following, strict=True)]
        lost = [part for part, rank in enumerate(found) if rank is None]
        if not lost:
            return number, names, [rank for rank in found if rank is not None]
        why = f"neither the owner nor the copy is left of the parts of {ranks_text(lost)} of {len(names)}"
    raise UnavailableError(f"ShardedOptimizer: {why}; go on from a file, as TrainState(save=) writes it")


class _Divided:
    """One state: which of its leaves are divided, and how."""

    def __init__(self, backend: Group, by: tuple[Any, Any, Any], part: Any) -> None:
        self._backend = backend
        self._opt, self._plan, self._made_of = by  # see ShardedTransformation.noted
        owners = self._opt.owners(self._plan, trees.flatten(part).names)
        self._leaves = [(k, i) for k, i in enumerate(owners) if i is not None]
        """Indices of the divided leaves, each with that of the parameter whose shape it has."""
        self._partitions: dict[int, Partition] = {}  # by number of ranks

    def _range(self, i: int, rank: int, size: int) -> range:
        """The elements of parameter `i` that are in the part of a rank."""
        if size not in self._partitions:
            self._partitions[size] = partition_of(self._plan.specs, size)
        return self._partitions[size].part(i, rank % size)

    def _pieces(self, part: Any, rank: int, size: int) -> list[Flat]:
        """The bytes of each divided leaf of a rank's part."""
        leaves = trees.flatten(part).leaves
        self._backend._await_streams([leaves[k] for k, _ in self._leaves], None)
        return [_packed(leaves[k], len(self._range(i, rank, size))) for k, i in self._leaves]

    def kept(self, part: Any) -> Any:
        return part  # whose arrays nobody changes

    def held(self, division: _Division, rank: int, name: str) -> dict[int, list[Flat]]:
        """What rank `rank` of a division holds of it, by rank."""
        size = len(division.members)
        return {
            (rank - 1) % size: division.copies[name],
            rank: self._pieces(division.parts[name], rank, size),
        }

    def passed_on(self, part: Any) -> list[Flat]:
        """The part of the rank before this one. Collective."""
        backend = self._backend
        rank, size = backend.rank, backend.size
        if size == 1:
            return []
        mine = self._pieces(part, rank, size)
        counts = [0] * size
        counts[(rank + 1) % size] = sum(map(len, mine))
        data, _ = backend.alltoallv(_joined(mine), counts)
        flat, found, at = trees.flatten(part), [], 0
        for k, i in self._leaves:
            n = len(self._range(i, rank - 1, size)) * _core.itemsize(arrays.info(flat.leaves[k]).dtype)
            found.append(data[at : at + n])
            at += n
        return found

    def made_for_now(self, part: Any) -> Any:
        if self._opt.divided_among == self._backend.size:
            return part
        if self._made_of is None:
            raise UnavailableError(
                f"ShardedOptimizer: the state was divided among {self._opt.divided_among} ranks, and there are "
                f"{self._backend.size} before the first step: a rank was lost, and its part with it"
            )
        made = self._opt.init(self._made_of)
        self._plan = self._opt.renewed(self._plan)
        return made

    def common(self, part: Any) -> list[Any]:
        leaves = list(trees.flatten(part).leaves)
        for k, _ in self._leaves:
            leaves[k] = None
        return leaves

    def with_common(self, part: Any, common: list[Any]) -> Any:
        flat = trees.flatten(part)
        leaves = list(common)
        for k, _ in self._leaves:
            leaves[k] = flat.leaves[k]
        return flat.rebuild(leaves)

    def whole(self, part: Any, root: int | None) -> Any:
        self._plan = self._opt.renewed(self._plan)
        return self._opt.gather_state(part, self._plan, root)

    def divide(self, whole: Any, like: Any) -> tuple[Any, list[Flat]]:
        """This rank's part of a whole state, and the copy that it keeps."""
        flat = trees.flatten(whole)

        def of(k: int, i: int) -> Flat:
            shape = tuple(np.shape(flat.leaves[k]))
            if shape != self._plan.specs[i].shape:
                raise MismatchError(
                    f"{flat.names[k]} of the state has shape {shape}, its parameter {self._plan.specs[i].shape}"
                )
            return _packed(flat.leaves[k], math.prod(shape))

        return self._cut(self.with_common(like, self.common(whole)), of)

    def divided_anew(
        self, like: Any, held: dict[int, list[Flat]], holders: list[int]
    ) -> Callable[[], tuple[Any, list[Flat]]]:
        """What gives this rank's part among the ranks of now, and the copy that it keeps. Collective.

        Args:
          like: any part.
          held: by rank of the division before, the bytes of parts that this rank has.
          holders: by rank of that division, the rank of now that passes on its part.
        """
        order = sorted(range(len(holders)), key=lambda r: (holders[r], r))
        at = {k: at for at, (k, _) in enumerate(self._leaves)}
        flat = trees.flatten(like)

        def of(k: int, i: int) -> Flat:
            mine = [held[r][at[k]] for r in order if holders[r] == self._backend.rank]
            data = self._backend.allgatherv(_joined(mine))
            whole, first = np.empty(len(data), np.uint8), 0
            for r in order:
                part, n = self._range(i, r, len(holders)), _core.itemsize(arrays.info(flat.leaves[k]).dtype)
                whole[part.start * n : part.stop * n] = data[first : first + len(part) * n]
                first += len(part) * n
            return whole

        found = self._cut(like, of)
        return lambda: found

    def _cut(self, like: Any, of: Callable[[int, int], Flat]) -> tuple[Any, list[Flat]]:
        """The part of this rank and that of the one before, of whole leaves, whose bytes are asked for in turn."""
        backend = self._backend
        self._plan, self._opt.divided_among = self._opt.renewed(self._plan), backend.size
        flat, copy = trees.flatten(like), []
        leaves = list(flat.leaves)
        for k, i in self._leaves:
            leaf, data = leaves[k], of(k, i)
            n = _core.itemsize(arrays.info(leaf).dtype)
            before = self._range(i, backend.rank - 1, backend.size)
            if backend.size > 1:
                copy.append(data[before.start * n : before.stop * n].copy())
            part, shape = self._plan.held(i), self._plan.part_shape(i)
            shape = self._plan.specs[i].shape if backend.size == 1 else shape
            leaves[k] = arrays.like_bytes(data[part.start * n : part.stop * n], leaf, shape)
        return self._opt.noted(flat.rebuild(leaves), self._plan, None), copy


def _packed(leaf: Any, count: int) -> Flat:
    """The bytes of the first elements of a leaf: all, or none."""
    data = np.empty(count * _core.itemsize(arrays.info(leaf).dtype), np.uint8)
    if count:
        _core.pack([leaf], data)
    return data


def _joined(pieces: Sequence[Flat]) -> Flat:
    return np.concatenate([*pieces, np.empty(0, np.uint8)])

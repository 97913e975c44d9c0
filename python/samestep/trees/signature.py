"""Checks that all ranks hold the same tree: 16 bytes if they do, else a report of the difference.

Leaves that are views of one array are compared as such, and operations treat them as one.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep import _core, arrays
from samestep._util.json_layout import Many
from samestep._util.text import by_rank
from samestep.arrays import ArrayInfo, overlaps
from samestep.arrays.overlaps import Place
from samestep.errors import InvalidArgumentError, MismatchError, UnavailableError
from samestep.group.group import Group
from samestep.trees import facts as facts_
from samestep.trees.facts import NO_FACTS, Facts
from samestep.trees.identity import attributes_text, is_array, is_number

ABSENT = "None"
VIEW = "a view of "
NUMBER = "a number"
OBJECT = "neither array nor number"

_ON_DEVICE = " on a "  # before the kind of a device
_REFUSED = "refused: "  # before why the call does not take a leaf
_ALL_BITS = 0xFFFF_FFFF_FFFF_FFFF


class Description(NamedTuple):
    """What one rank holds. Per leaf: its name, what it is, and the first leaf that is the same array."""

    act: str
    names: list[str]
    kinds: list[str]
    aliases: list[int]

    @classmethod
    def of(cls, act: str, names: Sequence[str], kinds: Sequence[str]) -> Description:
        """Of leaves no two of which are known to be one array."""
        return cls(act, list(names), list(kinds), list(range(len(names))))


class LeafTable(NamedTuple):
    """What the leaves of a tree are, as columns with one entry per leaf."""

    kinds: list[str]
    """What each leaf must be on all ranks: dtype, shape and kind of memory of an array, or what else it is."""
    infos: list[ArrayInfo | None]
    """Properties of an array; None for all else."""
    aliases: list[int]
    """Index of the first leaf that is the same array: the same elements, though it may be another view."""
    shared: list[list[Place]]
    """Leaves whose memory reaches into each other's, though they may have no element in common; see `join_views`."""
    problems: dict[int, str]
    """Why the elements of an array cannot be sent, by index. Its kind is `OBJECT`."""


def describe_leaves(  # noqa: PLR0912 (a call for each leaf would be felt)
    names: Sequence[str],
    leaves: Sequence[Any],
    act: str,
    backend: Group | None = None,
    *,
    waiting: Group | None = None,
) -> LeafTable:
    """Look at all leaves once.

    Args:
      backend: the group whose operations will work on the arrays; None if they are only read.
      waiting: the group whose ranks begin to compare trees next, and learn of what is raised here.

    Raises:
      InvalidArgumentError: an array is on another device than the group's; says which leaf.
      UnavailableError: the stream of an array is being captured into a graph.
    """
    kinds: list[str] = []
    infos: list[ArrayInfo | None] = []
    with_memory: list[int] = []
    ranges: list[tuple[int, int, bool]] = []
    any_folded = False
    on_device: list[tuple[Any, str, int, int, str]] = []
    problems: dict[int, str] = {}
    for i, leaf in enumerate(leaves):
        kind, info = "", None
        is_plain = type(leaf) is np.ndarray
        if is_plain or is_array(leaf):
            try:
                found = _core.view_info(leaf)
                kind = kind_of_array(found.dtype, found.shape, found.device)
                if found.device != "cpu" and not found.contiguous:
                    kind += _order_text(leaf, found.readonly)
                if not is_plain and isinstance(leaf, np.ndarray):
                    kind += attributes_text(leaf)
            except InvalidArgumentError as error:
                kind = _kind_of_other(leaf)
                if kind == OBJECT and not (isinstance(leaf, np.ndarray) and leaf.dtype.char in "OSUTMm"):
                    problems[i] = str(error)
            else:
                info = found
                if found.nbytes:
                    with_memory.append(i)
                    ranges.append((found.address, found.nbytes, True))
                    if not found.contiguous:
                        begin, reach, folded = _core.memory_span(leaf)
                        ranges[-1] = (begin, reach, True)
                        any_folded = any_folded or (folded and found.writable)
                    if found.device != "cpu":
                        text = f"{act}: {leaf_text(names[i])}"
                        on_device.append((leaf, found.device, found.device_index, found.address, text))
        kinds.append(kind or _kind_of_other(leaf))
        infos.append(info)
    if on_device:  # before ranks compare anything: one that is refused afterwards leaves the others behind
        _check_leaves(on_device, act, backend, waiting)
    aliases = list(range(len(leaves)))
    if not any_folded and (len(ranges) < 2 or _core.find_conflict(ranges) is None):
        return LeafTable(kinds, infos, aliases, [], problems)
    places = [overlaps.place(i, leaves[i]) for i in with_memory]
    first: dict[Any, int] = {}
    for one in places:
        aliases[one.leaf] = first.setdefault((one.address, one.strides, kinds[one.leaf]), one.leaf)
    return LeafTable(kinds, infos, aliases, overlaps.neighbours(places), problems)


def _check_leaves(
    on_device: list[tuple[Any, str, int, int, str]], act: str, backend: Group | None, waiting: Group | None
) -> None:
    try:
        _core.check_leaves(None if backend is None else backend._comm, on_device)
    except (InvalidArgumentError, UnavailableError) as error:
        if waiting is not None:
            _core.tell_refusal(waiting._comm, act, str(error))
        raise


def _order_text(leaf: Any, readonly: bool) -> str:
    """Elements in device memory are taken as they lie, so that ranks must have them in the same order."""
    order = _core.memory_order(leaf)
    if order is None:
        raise InvalidArgumentError("an array with gaps in device memory; pass a contiguous copy")
    if order and readonly:  # what it becomes is a new array, in row-major order
        raise InvalidArgumentError(
            "a read-only array in device memory that is not row-major; pass a contiguous copy"
        )
    return f" with axes {order} from the outermost to the innermost" if order else ""


@functools.lru_cache(maxsize=4096)
def kind_of_array(dtype: str, shape: tuple[int, ...], device: str = "cpu") -> str:
    """How descriptions and errors spell an array."""
    return f"{dtype} {shape}" if device == "cpu" else f"{dtype} {shape}{_ON_DEVICE}{device} device"


def _kind_of_other(leaf: Any) -> str:
    if leaf is None:
        return ABSENT
    if arrays.is_float0(leaf):
        return kind_of_array("float0", leaf.shape)
    return NUMBER if is_number(leaf) else OBJECT


def with_refusals(kinds: Sequence[str], refusals: Mapping[int, str]) -> list[str]:
    """The kinds of leaves, some of which the call does not take. Ranks that compare them all raise."""
    result = list(kinds)  # the table keeps its own
    for i, why in refusals.items():
        result[i] = _REFUSED + why
    return result


def raise_refused(group: str, everyone: Sequence[Description]) -> None:
    """Raise InvalidArgumentError, the same on every rank, for the first leaf that some rank's call does not take."""
    for rank, (act, names, kinds, _) in enumerate(everyone):
        if (found := first_refused(names, kinds)) is not None:
            where = f" on rank {rank}" if len(everyone) > 1 else ""
            raise InvalidArgumentError(f"{act} in group {group}: {leaf_text(found[0])}{where}: {found[1]}")


def first_refused(names: Sequence[str], kinds: Sequence[str]) -> tuple[str, str] | None:
    """The name of the first leaf that the call does not take, and why; None if it takes all."""
    if _REFUSED not in "\0".join(kinds):  # a loop would be felt
        return None
    refused = (
        (n, k.removeprefix(_REFUSED)) for n, k in zip(names, kinds, strict=True) if k.startswith(_REFUSED)
    )
    return next(refused, None)


class Comparison:
    """How ranks find out whether they hold the same tree, and in the same message whether facts are equal.

    What JAX traces of these is not compared here.
    """

    def __init__(self, facts: Facts = NO_FACTS) -> None:
        self.facts, self.key = NO_FACTS, 0
        self.add(facts)

    def add(self, facts: Facts) -> None:
        """Compare these, too."""
        if facts.texts:
            self.facts = Facts((*self.facts.texts, *facts.texts), cure=self.facts.cure or facts.cure)
            self.key = digest_of("\0".join(sum(self.facts.texts, ())))

    def suits(self, tree: _core.FastTree) -> bool:
        """Whether the call can take the fast path for a simple tree."""
        return True

    def same_everywhere(self, backend: Group, digest: int, timeout: float | None) -> bool:
        """Whether all ranks give the same 64 bits. Collective."""
        digest ^= self.key
        both = np.array([digest, digest ^ _ALL_BITS], np.uint64)
        if timeout is None:  # the call without keywords is the fast one
            backend.allreduce(both, "max")
        else:
            backend.allreduce(both, "max", timeout=timeout)
        largest, complement_of_smallest = both.tolist()
        return bool(largest ^ complement_of_smallest == _ALL_BITS)


BY_DIGEST = Comparison()


def try_fast_tree(
    backend: Group,
    tree: Any,
    act: str,
    timeout: float | None,
    by: Comparison = BY_DIGEST,
    *,
    device: int | None = None,
) -> tuple[_core.FastTree | None, bool]:
    """The fast path for simple trees that are equal on all ranks. Collective if it is tried.

    Args:
      device: where all leaves may be instead of in host memory.

    Returns:
      The tree if all ranks can use the fast path; and whether the ranks have compared digests.
    """
    found = _core.fast_tree(tree, -1 if device is None else device) if backend.size > 1 else None
    if found is None or not by.suits(found) or (found.on_device and _core.is_captured(found.leaves[0])):
        return None, False
    if by.same_everywhere(backend, found.digest ^ zlib.crc32(act.encode()), timeout):
        return found, True
    return None, True


def compare(
    backend: Group,
    mine: Description,
    timeout: Callable[[], float | None] = lambda: None,
    *,
    compared: bool = False,
    by: Comparison = BY_DIGEST,
    absent_is_fine: bool = False,
    aliases: bool = True,
) -> list[Description] | None:
    """None if all ranks give the same description; otherwise everybody's, in order of rank. Collective.

    Args:
      compared: this rank has given the digest of a plain tree, which differed from what others gave.
      absent_is_fine, aliases: what may differ, as for `check_same`.

    Raises: as `check_same`, on all ranks; also if facts differ.
    """
    is_alike = backend.size == 1
    if not is_alike and not compared:
        shared = [f"{i} is {alias}" for i, alias in enumerate(mine.aliases) if i != alias]
        text = "\0".join([mine.act, *mine.names, *mine.kinds, *shared])
        is_alike = by.same_everywhere(backend, digest_of(text), timeout())
    if is_alike:
        raise_refused(backend.name, [mine])
        return None
    names, texts = ([fact[i] for fact in by.facts.texts] for i in range(2))
    sent = [mine.act, [*mine.names, *names], [*mine.kinds, *texts], mine.aliases]
    layout = [str, Many(str), Many(str), Many(int)]
    everyone, known = [], []
    for act, theirs, kinds, same in backend._allgather_facts(sent, layout, timeout()):
        n = len(same)
        everyone.append(Description(act, theirs[:n], kinds[:n], same))
        known.append(dict(zip(theirs[n:], kinds[n:], strict=True)))
    raise_refused(backend.name, everyone)
    if all(description.act == mine.act for description in everyone):
        facts_.check(f"{mine.act} in group {backend.name}", known, by.facts.cure)
    check_same(backend.name, everyone, absent_is_fine=absent_is_fine, aliases=aliases)
    return everyone


def digest_of(text: str) -> int:
    """64 bits of a text, the same on all ranks."""
    from hashlib import blake2b  # brings a library of ciphers

    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def check_same(
    group: str,
    everyone: Sequence[Description],
    *,
    absent_is_fine: bool = False,
    aliases: bool = True,
    cure: str = "",
) -> None:
    """Raise MismatchError, the same on every rank, for the first leaf that is not the same everywhere; or, before,
    InvalidArgumentError for one that the call does not take.

    Args:
      absent_is_fine: let a leaf be None on some ranks; with the array that it is again elsewhere.
      aliases: compare also which entries of the tree are one and the same array.
      cure: the end of the error; "" for the usual one.
    """
    raise_refused(group, everyone)
    acts = [description.act for description in everyone]
    if len(set(acts)) > 1:
        raise MismatchError(f"group {group}: {by_rank(acts)}; all ranks must make the same call")
    leaves = [
        {
            name: f"the array {description.names[alias]} again"
            if aliases and alias != i and not kind.startswith(VIEW)
            else kind
            for i, (name, kind, alias) in enumerate(zip(*description[1:], strict=True))
        }
        for description in everyone
    ]
    partners = {
        description.names[i]: description.names[alias]
        for description in everyone
        for i, alias in enumerate(description.aliases)
        if alias != i and aliases
    }
    for name in dict.fromkeys(name for mine in leaves for name in mine):
        kinds = [mine.get(name, "missing") for mine in leaves]
        found = set(kinds)
        if absent_is_fine and not any(
            mine.get(name) == ABSENT != mine.get(partners.get(name, name)) for mine in leaves
        ):
            found -= {ABSENT}
        if len(found) > 1:
            elements = [kind.partition(_ON_DEVICE)[0] for kind in kinds]
            with_memory = [kind if _ON_DEVICE in kind else f"{kind} in host memory" for kind in kinds]
            kinds = elements if len(set(elements)) > 1 else with_memory
            raise MismatchError(
                f"{acts[0]} in group {group}: {leaf_text(name)} is {by_rank(kinds)}"
                f"{cure or '; all ranks must pass trees of the same structure, shapes and dtypes'}"
            )
    orders = [", ".join(description.names) for description in everyone]
    if len(set(orders)) > 1:
        raise MismatchError(f"{acts[0]} in group {group}: the leaves are ordered {by_rank(orders)}")


def leaf_text(name: str) -> str:
    """How errors name a leaf; a tree may be one leaf, which has no name."""
    return f"leaf {name or 'at the top'}"


_PART = "in the memory of "
_FOLDED = "overlapping itself "


def join_views(names: Sequence[str], looks: LeafTable, *, reads: bool) -> tuple[int, int] | None:
    """Make views of the same elements one array in `looks`, and say in its kinds how leaves share memory.

    A transposed weight is such a view. Kinds contain where it lies in the other one, so that ranks on which that
    differs get a MismatchError when they compare.

    Args:
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


def in_each_array(
    call: Callable[..., list[Any]], names: Sequence[str], values: Sequence[Any], looks: LeafTable
) -> list[Any]:
    """`values` with what `call` returns for the arrays among them, each once, given these, their infos and names."""
    infos = {i: info for i, info in enumerate(looks.infos) if info is not None and looks.aliases[i] == i}
    made = call([values[i] for i in infos], list(infos.values()), [names[i] for i in infos])
    results = list(values)
    for i, value in zip(infos, made, strict=True):
        results[i] = value
    return [
        results[i if kind.startswith(VIEW) else alias]
        for i, (kind, alias) in enumerate(zip(looks.kinds, looks.aliases, strict=True))
    ]


def _where(names: Sequence[str], one: Place, other: Place) -> str:
    offset = one.address - other.address
    return (
        f"{leaf_text(names[other.leaf])} at byte {offset} with strides {one.strides} (there {other.strides})"
    )


def refuse_clash(
    group: str, mine: Description, everyone: Sequence[Description] | None, clash: tuple[int, int] | None
) -> None:
    """Raise InvalidArgumentError, on all ranks, for what `join_views` found on any. After they have compared kinds."""
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

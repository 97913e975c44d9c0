"""Whether all ranks hold the same tree: 16 bytes to find out, and a report of the difference if not."""

from __future__ import annotations

import functools
import numbers
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from samestep import _core, arrays
from samestep.arrays import ArrayInfo
from samestep.errors import InvalidArgumentError, MismatchError

if TYPE_CHECKING:
    from samestep.backend import Backend

ABSENT = "None"
NUMBER = "a number"
OBJECT = "neither array nor number"

_ON_DEVICE = " on a "  # before the kind of a device
_ALL_BITS = 0xFFFF_FFFF_FFFF_FFFF


class Description(NamedTuple):
    """What one rank holds. Per leaf: its name, what it is, and the first leaf that is the same array."""

    act: str
    names: list[str]
    whats: list[str]
    places: list[int]


class Looks(NamedTuple):
    """What the leaves of a tree are, as columns with one entry per leaf."""

    whats: list[str]
    """What other ranks must have in this place: dtype, shape and kind of memory of an array, or what else it is."""
    infos: list[ArrayInfo | None]
    """Properties of an array; None for all else."""
    places: list[int]
    """Index of the first leaf that is the same array: the same elements, though it may be another view."""


def look_at(names: Sequence[str], leaves: Sequence[Any]) -> Looks:
    """Look at all leaves once.

    Raises:
      InvalidArgumentError: an array whose elements cannot be sent; says which leaf.

    Example:
      >>> import numpy as np
      >>> from samestep.agreement import look_at
      >>> weight = np.zeros((2, 3), "f4")
      >>> looks = look_at("abcd", [weight, 1.5, None, weight[:]])
      >>> looks.whats
      ['float32 (2, 3)', 'a number', 'None', 'float32 (2, 3)']
      >>> looks.places
      [0, 1, 2, 0]
    """
    whats: list[str] = []
    infos: list[ArrayInfo | None] = []
    memory: dict[int, tuple[Any, ...]] = {}
    for i, leaf in enumerate(leaves):
        what, info = "", None
        if type(leaf) is np.ndarray or arrays.is_array(leaf):
            try:
                dtype, shape, strides, nbytes, readonly, contiguous, device, _, address = _core.view_info(
                    leaf
                )
            except InvalidArgumentError as error:
                if not isinstance(leaf, np.ndarray) or leaf.dtype.char not in "OSUMm":
                    raise InvalidArgumentError(f"leaf {names[i]}: {error}") from error
            else:
                what = _what_array(dtype, shape, device)
                info = ArrayInfo(dtype, shape, nbytes, not readonly, contiguous, device)
                if nbytes:
                    memory[i] = (address, strides, what)
        whats.append(what or _what_else(leaf))
        infos.append(info)
    return Looks(whats, infos, _first_places(memory, len(leaves)))


def _first_places(memory: dict[int, tuple[Any, ...]], n_leaves: int) -> list[int]:
    places = list(range(n_leaves))
    if len({address for address, *_ in memory.values()}) < len(memory):
        first: dict[Any, int] = {}
        for i, elements in memory.items():
            places[i] = first.setdefault(elements, i)
    return places


@functools.lru_cache(maxsize=4096)
def _what_array(dtype: str, shape: tuple[int, ...], device: str) -> str:
    return f"{dtype} {shape}" if device == "cpu" else f"{dtype} {shape}{_ON_DEVICE}{device} device"


def _with_place(what: str) -> str:
    return what if _ON_DEVICE in what else f"{what} in host memory"


def _what_else(leaf: Any) -> str:
    if leaf is None:
        return ABSENT
    return NUMBER if is_number(leaf) else OBJECT


def is_number(leaf: Any) -> bool:
    """A Python number, or a NumPy scalar that is no text."""
    if isinstance(leaf, np.generic):
        return not isinstance(leaf, (np.flexible, np.object_))
    return isinstance(leaf, numbers.Number)


def same_everywhere(backend: Backend, digest: int, timeout: float | None) -> bool:
    """Whether all ranks give the same 64 bits. Collective."""
    both = np.array([digest, digest ^ _ALL_BITS], np.uint64)
    if timeout is None:  # the call without keywords is the fast one
        backend.allreduce(both, "max")
    else:
        backend.allreduce(both, "max", timeout=timeout)
    largest, complement_of_smallest = both.tolist()
    return bool(largest ^ complement_of_smallest == _ALL_BITS)


def plain(
    backend: Backend, tree: Any, act: str, timeout: float | None
) -> tuple[_core.PlainTree | None, bool]:
    """The short way for trees that are plain and the same on all ranks. Collective where it is tried.

    Returns:
      The tree if all ranks can go that way; and whether the ranks have been compared, so that they differ.
    """
    found = _core.plain_tree(tree) if backend.size > 1 else None
    if found is None:
        return None, False
    if same_everywhere(backend, found.digest ^ zlib.crc32(act.encode()), timeout):
        return found, True
    return None, True


def everyones(
    backend: Backend, mine: Description, timeout: Callable[[], float | None], *, compared: bool = False
) -> list[Description] | None:
    """None if all ranks give the same description; otherwise everybody's, in order of rank. Collective.

    Args:
      backend: the group.
      mine: what this rank holds.
      timeout: seconds left.
      compared: this rank has given the digest of a plain tree, which differed from what others gave.
    """
    if backend.size == 1:
        return None
    if compared:
        return list(backend.allgather_object(mine, timeout=timeout()))
    from hashlib import blake2b  # brings a library of ciphers

    shared = [f"{i} is {place}" for i, place in enumerate(mine.places) if i != place]
    text = "\0".join([mine.act, *mine.names, *mine.whats, *shared])
    digest = int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
    if same_everywhere(backend, digest, timeout()):
        return None
    return list(backend.allgather_object(mine, timeout=timeout()))


def check_same(
    group: str, everyone: Sequence[Description], *, absent_is_fine: bool = False, places: bool = True
) -> None:
    """Raise MismatchError, the same on every rank, for the first leaf that is not the same everywhere.

    Args:
      group: name of the group, for the text.
      everyone: what each rank holds.
      absent_is_fine: let a leaf be None on some ranks; with the array that it is again elsewhere.
      places: compare also which leaves are one and the same array.
    """
    acts = [description.act for description in everyone]
    if len(set(acts)) > 1:
        raise MismatchError(f"group {group}: {by_rank(acts)}; all ranks must make the same call")
    leaves = [
        {
            name: what if place == i or not places else f"the array {description.names[place]} again"
            for i, (name, what, place) in enumerate(zip(*description[1:], strict=True))
        }
        for description in everyone
    ]
    partners = {
        description.names[i]: description.names[place]
        for description in everyone
        for i, place in enumerate(description.places)
        if place != i and places
    }
    for name in dict.fromkeys(name for mine in leaves for name in mine):
        whats = [mine.get(name, "missing") for mine in leaves]
        found = set(whats)
        if absent_is_fine and not any(
            mine.get(name) == ABSENT != mine.get(partners.get(name, name)) for mine in leaves
        ):
            found -= {ABSENT}
        if len(found) > 1:
            elements = [what.partition(_ON_DEVICE)[0] for what in whats]
            whats = elements if len(set(elements)) > 1 else [_with_place(what) for what in whats]
            raise MismatchError(
                f"{acts[0]} in group {group}: leaf {name or 'at the top'} is {by_rank(whats)}; "
                "all ranks must pass trees of the same structure, shapes and dtypes"
            )
    orders = [", ".join(description.names) for description in everyone]
    if len(set(orders)) > 1:
        raise MismatchError(f"{acts[0]} in group {group}: the leaves are ordered {by_rank(orders)}")


def by_rank(texts: Sequence[str]) -> str:
    """`a on ranks 0, 2 and b on rank 1`"""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(str(rank))
    return " and ".join(f"{text} on rank{'s' * (len(r) > 1)} {', '.join(r)}" for text, r in ranks.items())

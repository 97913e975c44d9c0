"""What users pass as tensors, and the runs of memory that the core works on in their place.

Ranks have to agree on counts, not on shapes, so the core sees flat runs: the array's own memory where that is
one run, and otherwise a copy. Lists of arrays are one run, too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from samestep import _core, arrays
from samestep.device_arrays import FlatView
from samestep.errors import InvalidArgumentError

__all__ = [
    "Place",
    "count",
    "described",
    "fill",
    "in_place",
    "joined",
    "listed",
    "new_run",
    "plain",
    "read",
    "spread",
]


class Place(NamedTuple):
    """Where the core receives, and what has to be done after that; it gives the function's return value."""

    run: Any
    finish: Callable[[], Any] | None


def described(x: Any, verb: str, name: str = "tensor") -> arrays.ArrayInfo:
    """What an array is. Raises TypeError, naming the parameter, where `x` is none."""
    if not arrays.is_array(x):
        raise TypeError(f"{verb}: {name} must be an array, got {type(x).__name__}")
    return arrays.info(x)


def count(known: arrays.ArrayInfo) -> int:
    """Elements of an array."""
    return math.prod(known.shape)


def _flat(x: Any, known: arrays.ArrayInfo) -> Any:
    """The memory of `x` as a run of one dimension; None where it is none, or the library is unknown."""
    if len(known.shape) == 1:
        return x  # the core stages it where it has gaps
    if known.contiguous and isinstance(x, np.ndarray):
        return x.reshape(-1)
    torch = sys.modules.get("torch")
    if known.contiguous and torch is not None and isinstance(x, torch.Tensor):
        return x.detach().view(-1)
    if known.contiguous and hasattr(x, "__cuda_array_interface__"):
        return FlatView(x, count(known))
    return None


def plain(x: Any) -> Any:
    """A run that the core may write in place of `x`, where that is to be seen in a microsecond; else None."""
    if type(x) is np.ndarray:
        flags = x.flags
        if flags.writeable and (x.ndim == 1 or flags.c_contiguous):
            return x if x.ndim == 1 else x.reshape(-1)
        return None
    torch = sys.modules.get("torch")
    if torch is not None and type(x) is torch.Tensor and x.is_contiguous():
        return x if x.dim() == 1 else x.detach().view(-1)
    return None


def read(x: Any, known: arrays.ArrayInfo, *, beside_lists: bool = False) -> Any:
    """The elements of `x` as a run to send from.

    `beside_lists`: ranks give lists of arrays, too, whose run is of the host also for arrays in device memory.
    """
    run = None if beside_lists and known.device != "cpu" else _flat(x, known)
    return joined([x], known) if run is None else run


def in_place(x: Any, known: arrays.ArrayInfo, *, filled: bool = True, beside_lists: bool = False) -> Place:
    """Where the core puts the result that `x` is to get.

    `x` itself gets it where it can be written, and nothing is returned; else a new array is returned.

    Args:
      x: the array.
      known: what it is.
      filled: the core reads the elements of `x` there first.
      beside_lists: as for `read`.
    """
    run = _flat(x, known) if known.writable and not (beside_lists and known.device != "cpu") else None
    if run is not None:
        return Place(run, None)
    staged = _staging(x, known, known.shape if not known.writable else (count(known),))
    if filled:
        _core.pack([x], staged)
    if not known.writable:
        return Place(_flat(staged, arrays.info(staged)), lambda: arrays.finish(x, staged))
    if not filled:
        _core.pack([x], staged)
    _core.unpack(staged, [x])  # an array that cannot be written is refused before anything is sent

    def finish() -> None:
        _core.unpack(staged, [x])
        _core.note_written(x)

    return Place(staged, finish)


def listed(
    tensors: Any, n: int, like: arrays.ArrayInfo, verb: str, name: str, *, written: bool
) -> list[arrays.ArrayInfo]:
    """Check a list of one array for each rank.

    Args:
      tensors: what the user gave.
      n: how many there have to be.
      like: dtype and count they must have.
      verb, name: function and parameter, for messages.
      written: they are to receive.

    Raises:
      TypeError: no list or tuple, or an entry that is no array.
      InvalidArgumentError: another length; an entry of another dtype or count, or that cannot receive.
    """
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{verb}: {name} must be a list or tuple of arrays, got {type(tensors).__name__}")
    if len(tensors) != n:
        raise InvalidArgumentError(f"{verb}: {name} must have {n} arrays, got {len(tensors)}")
    found = []
    for i, x in enumerate(tensors):
        known = described(x, verb, f"{name}[{i}]")
        if (known.dtype, count(known)) != (like.dtype, count(like)):
            raise InvalidArgumentError(
                f"{verb}: {name}[{i}] has {count(known)} elements of {known.dtype}, "
                f"but {count(like)} of {like.dtype} are needed"
            )
        if written and not known.writable and not isinstance(tensors, list):
            raise InvalidArgumentError(
                f"{verb}: {name}[{i}] cannot be written; give a list, whose entries are replaced then"
            )
        found.append(known)
    return found


def new_run(like: Any, known: arrays.ArrayInfo, n: int) -> Any:
    """A run to receive `n` arrays like one."""
    return _staging(like, known, (n * count(known),))


def _staging(like: Any, known: arrays.ArrayInfo, shape: tuple[int, ...]) -> Any:
    """A new array that others are copied into and from: of the host also for arrays in device memory."""
    if known.device != "cpu":
        return arrays.new_of("numpy", known.dtype, shape)
    return arrays.new_like(like, shape)


def joined(tensors: Any, known: arrays.ArrayInfo) -> Any:
    """The elements of arrays like `known`, one array after the other, as a new run."""
    run = new_run(tensors[0], known, len(tensors))
    _core.pack(list(tensors), run)
    return run


def spread(run: Any, tensors: Any, infos: list[arrays.ArrayInfo]) -> None:
    """Write a run into arrays, one after the other; entries that cannot be written are replaced by new arrays."""
    targets = [x if known.writable else arrays.new_like(x) for x, known in zip(tensors, infos, strict=True)]
    _core.unpack(run, targets)
    for i, (known, target) in enumerate(zip(infos, targets, strict=True)):
        if known.writable:
            _core.note_written(target)
        else:
            tensors[i] = arrays.finish(tensors[i], target)


def fill(run: Any, tensors: Any, infos: list[arrays.ArrayInfo], *, only: int | None = None) -> None:
    """Write the same run into each array, or into one; entries that cannot be written are replaced."""
    for i, known in enumerate(infos):
        if only in (None, i):
            one = [tensors[i]]
            spread(run, one, [known])
            if not known.writable:
                tensors[i] = one[0]

"""The contiguous buffers that the core uses for the arrays that users pass.

Ranks have to agree on counts, not on shapes, so the core gets flat buffers: the memory of the array itself if that is
contiguous, otherwise a copy. A list of arrays becomes one buffer, too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from samestep import _core, arrays
from samestep.errors import InvalidArgumentError


class Place(NamedTuple):
    """The buffer that the core receives into, and the function to call afterwards, which gives the return value."""

    run: Any
    finish: Callable[[], Any] | None
    source: Any
    """The buffer with the elements of the array: `run` itself, or the array's memory if that cannot be written."""


def described(x: Any, verb: str, name: str = "tensor") -> arrays.ArrayInfo:
    """Describe an array. Raises TypeError, naming the parameter, if `x` is not an array."""
    if not arrays.is_array(x):
        raise TypeError(f"{verb}: {name} must be an array, got {type(x).__name__}")
    return arrays.info(x, verb)


def count(known: arrays.ArrayInfo) -> int:
    """Number of elements of an array."""
    return math.prod(known.shape)


def _flat(x: Any, known: arrays.ArrayInfo) -> Any:
    """The memory of `x` as a buffer of one dimension; None if it is not contiguous, or the library is unknown."""
    if len(known.shape) == 1:
        return x  # the core stages it if it has gaps
    if not known.contiguous:
        return None
    return arrays.of(x).flat(x)


def contiguous_or_none(x: Any) -> Any:
    """A buffer that the core may write in place of `x`, if a check of a microsecond finds one; else None."""
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
    """The elements of `x` as a buffer to send.

    `beside_lists`: other buffers of the operation are joined lists, which are in host memory even for device arrays.
    """
    run = None if beside_lists and known.device != "cpu" else _flat(x, known)
    return joined([x], known) if run is None else run


def in_place(x: Any, known: arrays.ArrayInfo, *, filled: bool = True, beside_lists: bool = False) -> Place:
    """Prepare `x` to receive the result of an operation.

    If `x` can be written it receives the result, and the function returns None; otherwise it returns a new array.

    Args:
      filled: the core also reads the elements of `x` there.
      beside_lists: as for `read`.
    """
    on_device = known.device != "cpu"
    run = _flat(x, known) if (not beside_lists if on_device else known.writable) else None
    if run is not None and known.writable:
        return Place(run, None, run)
    if run is not None:
        # On the device, too: an array that is only read there, or that other ranks can write, is not staged either.
        made = arrays.of(x).like(x)
        return Place(_flat(made, arrays.info(made)), lambda: arrays.of(x).finish(made, like=x), run)
    staged = _staging(x, known, known.shape if not known.writable else (count(known),))
    if filled:
        _core.pack([x], staged)
    if not known.writable:
        run = _flat(staged, arrays.info(staged))
        return Place(run, lambda: arrays.of(x).finish(staged, like=x), run)
    if not filled:
        _core.pack([x], staged)
    _core.unpack(staged, [x])  # an array that cannot be written is rejected before anything is sent
    return Place(staged, lambda: _core.unpack(staged, [x]), staged)


def listed(
    tensors: Any, n: int, like: arrays.ArrayInfo, verb: str, name: str, *, written: bool
) -> list[arrays.ArrayInfo]:
    """Describe the `n` arrays of a list, or raise what is wrong: all are `like`, and if `written` they can receive."""
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
    """A buffer to receive `n` arrays of the same description."""
    return _staging(like, known, (n * count(known),))


def _staging(like: Any, known: arrays.ArrayInfo, shape: tuple[int, ...]) -> Any:
    """A new host array as a staging buffer, also for arrays in device memory."""
    row = arrays.of(like) if known.device == "cpu" else arrays.named("numpy")
    return row.new(known.dtype, shape)


def joined(tensors: Any, known: arrays.ArrayInfo) -> Any:
    """The concatenated elements of arrays like `known`, in a new buffer."""
    run = new_run(tensors[0], known, len(tensors))
    _core.pack(list(tensors), run)
    return run


def spread(run: Any, tensors: Any, infos: list[arrays.ArrayInfo]) -> None:
    """Split a buffer into the arrays of a list; entries that cannot be written are replaced by new arrays."""
    targets = arrays.targets(tensors, infos)
    _core.unpack(run, targets)
    arrays.deliver(tensors, infos, range(len(infos)), targets)

"""New arrays of the same library to receive into, and their conversion to what the caller gets.

No array library but NumPy is imported: an array of another library exists only where that library has
been imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from samestep import _core
from samestep._core import ArrayInfo
from samestep._util.dtypes import numpy_dtype
from samestep.arrays.describe import device_of, info, is_jax, keeping_dtype, library_of, order_of
from samestep.arrays.libraries import from_host
from samestep.arrays.streams import jax_stream
from samestep.errors import InvalidArgumentError
from samestep.gpu.device_array import DeviceArray

_ALIGNMENT = 64  # JAX uses NumPy memory without a copy only if it is aligned so


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    block = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + nbytes].view(dtype).reshape(shape)


def new_array(library: str, dtype: str, shape: tuple[int, ...], device: Any = None) -> Any:
    """A new writable array to receive into, for what `library_of` named.

    Device memory is of `device`, an index, for JAX also its device. None: of the current device, which each thread has
    its own of, at first device 0.

    For JAX it is NumPy memory, or a JAX array in device memory that nobody else has yet; `to_library_of` turns it into
    the result.
    """
    if library.startswith("torch"):
        import torch

        place = None
        if library == "torch gpu":
            place = torch.device("cuda", torch.cuda.current_device() if device is None else device)
        return torch.empty(shape, dtype=getattr(torch, dtype), device=place)
    if library == "cupy":
        import cupy

        with cupy.cuda.Device(device):
            return cupy.empty(shape, numpy_dtype(dtype))
    if library == "jax gpu":
        from samestep.gpu.jax_array import UnsharedJaxArray

        return UnsharedJaxArray(dtype, shape, device, stream_of=jax_stream)
    if library == "gpu":
        return _on_device(dtype, shape, None, device=device)
    known = numpy_dtype(dtype)
    return _aligned(shape, known) if library == "jax" else np.empty(shape, known)


def orders_axes(library: str) -> bool:
    """Whether `new_in_order` makes arrays that are not row-major for what `library_of` named."""
    return library in ("torch gpu", "cupy")


def new_in_order(
    library: str, dtype: str, shape: tuple[int, ...], order: Sequence[int], device: int | None
) -> Any:
    """As `new_array`, with the axes in the order in memory that `_core.memory_order` names."""
    if not order:
        return new_array(library, dtype, shape, device)
    axes = [*(axis for axis, extent in enumerate(shape) if extent == 1), *order]
    lying = new_array(library, dtype, tuple(shape[axis] for axis in axes), device)
    places = tuple(axes.index(axis) for axis in range(len(shape)))
    return lying.permute(places) if library == "torch gpu" else lying.transpose(places)


def _on_device(
    dtype: str, shape: tuple[int, ...], stream: int | None, kind: str = "", *, device: int | None
) -> DeviceArray:
    from samestep.gpu import runtime

    return DeviceArray(runtime.current_gpu(kind), dtype, tuple(shape), device=device, stream=stream)


def new_like(x: Any, shape: tuple[int, ...] | None = None) -> Any:
    """A new writable array to receive into, with the dtype, library, device and (unless given) shape of `x`."""
    known, library = info(x), library_of(x)
    of_shape = known.shape if shape is None else shape
    if library == "gpu" and known.device != "cpu":
        return _on_device(known.dtype, of_shape, _core.stream_of(x), known.device, device=device_of(x))
    device = next(iter(x.devices())) if library == "jax gpu" else device_of(x)
    return new_array(library, known.dtype, of_shape, device)


def fill_with_zeros(x: Any) -> None:
    """Set all elements of an array that `new_array` or `new_in_order` made."""
    _core.unpack(np.zeros(info(x).nbytes, np.uint8), [x], as_they_lie=True)


def place_of(x: Any) -> Any:
    """The sharding of an array that JAX has committed to its devices; None for all else.

    Only what is committed may not be moved: JAX computes with other arrays wherever their partners are.
    """
    return x.sharding if is_jax(x) and x.committed else None


def to_library_of(x: Any, received: Any) -> Any:
    """What was received into `new_like(x)`, as an array of the library and device of `x`."""
    if not is_jax(x):
        if isinstance(x, np.ndarray) or not isinstance(received, np.ndarray):
            return received
        return from_host(library_of(x), received)
    library = "jax" if isinstance(received, np.ndarray) else "jax gpu"
    if x.committed or library == "jax gpu":
        return to_library(library, received, place_of(x))
    with sys.modules["jax"].default_device(next(iter(x.devices()))):
        return to_library(library, received)


def to_library(library: str, received: Any, place: Any = None) -> Any:
    """What was received into `new_array(library, ...)`, as an array of that library, for JAX committed to `place`."""
    if library not in ("jax", "jax gpu"):
        return from_host(library, received)
    import jax

    if len(getattr(place, "spec", ())) > len(received.shape):  # replicated: the same place for fewer axes
        replicated = jax.sharding.PartitionSpec()
        place = jax.sharding.NamedSharding(place.mesh, replicated, memory_kind=place.memory_kind)
    array = received.array if library == "jax gpu" else received
    if library == "jax gpu" and place is None:
        return array
    with keeping_dtype(array):
        return jax.device_put(array, place)


def targets(xs: Sequence[Any], infos: Sequence[ArrayInfo]) -> list[Any]:
    """Where results for arrays go: the arrays, or new ones for those that cannot be written."""
    return [x if known.writable else new_like(x) for x, known in zip(xs, infos, strict=True)]


def deliver(xs: Any, infos: Sequence[ArrayInfo], which: Iterable[int], written: Sequence[Any]) -> None:
    """Put what `targets` gave for some arrays of a list, and now holds results, in place of those not writable."""
    for i, target in zip(which, written, strict=True):
        if not infos[i].writable:
            xs[i] = to_library_of(xs[i], target)


def copy_if_overlapping(x: Any, out: Any, verb: str) -> Any:
    """`x`, or a copy of it if writing to `out` would change it.

    Raises:
      InvalidArgumentError: they overlap in device memory.
    """
    try:
        overlap = _core.share_memory(x, out)
    except (TypeError, InvalidArgumentError):
        info(x, verb)
        info(out, verb)
        raise
    if not overlap:
        return x
    if info(x).device != "cpu":
        raise InvalidArgumentError(f"{verb}: x and out overlap in device memory; pass a copy of x")
    own = new_like(x)
    copy(x, own, verb)
    return own


def copy(x: Any, out: Any, verb: str) -> None:
    """Copy the elements of `x` into `out`, whichever libraries and layouts they have.

    Raises:
      InvalidArgumentError: `out` has another dtype or shape, or cannot be written.
    """
    source, target = info(x, verb), info(out, verb)
    if (source.dtype, source.shape) != (target.dtype, target.shape):
        raise InvalidArgumentError(
            f"{verb}: out is {target.dtype}{list(target.shape)} but the input is {source.dtype}{list(source.shape)}"
        )
    if not target.writable:
        raise InvalidArgumentError(
            f"{verb}: out: the array is read-only; pass a writable copy such as np.array(x)"
        )
    if source.device != "cpu" and target.device != "cpu" and _core.copy_on_device(x, out):
        return
    block = np.empty(source.nbytes, np.uint8)
    _core.pack([x], block, as_they_lie=True)
    if order_of(x) != order_of(out):
        lying = np.empty_like(block)
        _elements(lying, out)[...] = _elements(block, x)
        block = lying
    _core.unpack(block, [out], as_they_lie=True)


def _elements(block: np.ndarray[Any, Any], x: Any) -> np.ndarray[Any, Any]:
    """The bytes of `block`, into which `x` is packed in memory order, as elements with the axes of `x`."""
    known = info(x)
    kind = np.dtype((np.void, _core.itemsize(known.dtype)))
    strides = known.strides if order_of(x) else None
    elements: np.ndarray[Any, Any] = np.ndarray(known.shape, kind, block, strides=strides)
    return elements

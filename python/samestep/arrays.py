"""What counts as an array, what may be written, and new arrays of the same library.

No array library but NumPy is imported: an array of another library exists only where that library has
been imported already.
"""

from __future__ import annotations

import array as _array
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from samestep import _core
from samestep.errors import InvalidArgumentError

if TYPE_CHECKING:
    from samestep.device_arrays import DeviceArray

__all__ = ["ArrayInfo", "finish", "info", "is_array", "new_like", "new_of", "readable"]

_ALIGNMENT = 64  # JAX takes NumPy memory over without a copy only where it is aligned so


class ArrayInfo(NamedTuple):
    """What an array is, whichever library made it."""

    dtype: str
    """NumPy's name of the element type; "bfloat16" and the float8 types as ml_dtypes names them."""
    shape: tuple[int, ...]
    nbytes: int
    writable: bool
    contiguous: bool
    device: str
    """"cpu", "cuda" or "rocm"."""


def is_array(x: Any) -> bool:
    """Whether `x` is an array: not a Python or NumPy scalar, not bytes or str, not a list.

    Example:
      >>> is_array(np.zeros(3)), is_array(np.float32(1)), is_array([1.0])
      (True, False, False)
    """
    if isinstance(x, (np.ndarray, _array.array, memoryview, bytearray)):
        return True
    if isinstance(x, (np.generic, type)):
        return False
    return hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")


def info(x: Any) -> ArrayInfo:
    """Describe an array.

    Raises:
      TypeError: `x` is no array.
      InvalidArgumentError: its elements cannot be sent (dtype, byte order, layout).
    """
    dtype, shape, _, nbytes, readonly, contiguous, device, _, _ = _core.view_info(x)
    return ArrayInfo(dtype, shape, nbytes, not readonly, contiguous, device)


def readable(x: Any, verb: str) -> tuple[Any, bool]:
    """An array for what a user passes where a value is meant: arrays as they are, numbers as 0-d arrays.

    Returns:
      The array, and whether `x` was a number, so that the result should be one.
    """
    if isinstance(x, (np.generic, bool, int, float, complex)):
        value = np.array(x)
        if value.dtype == object:
            raise InvalidArgumentError(
                f"{verb}: {x!r} does not fit 64 bits; send it with the ..._object verbs"
            )
        return value, True
    return x, False


def _library(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def is_jax(x: Any) -> bool:
    """Whether `x` is a JAX array (a tracer counts too)."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def library_of(x: Any) -> str:
    """Name of the library whose arrays `x` should be answered with.

    "numpy", "torch" or "jax"; for device memory "torch gpu", "jax gpu", "cupy", or "gpu" for our own arrays, where
    the library of `x` cannot be asked for one.
    """
    if is_jax(x):
        return "jax gpu" if _jax_platform(x) in ("gpu", "cuda", "rocm") else "jax"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch gpu" if x.is_cuda else "torch"
    if isinstance(x, np.ndarray) or not hasattr(x, "__cuda_array_interface__"):
        on_device = not isinstance(x, np.ndarray) and _core.view_info(x)[6] != "cpu"
        return "gpu" if on_device else "numpy"
    return "cupy" if _library(x) == "cupy" else "gpu"


def _jax_platform(x: Any) -> str:
    jax = sys.modules["jax"]
    return "" if isinstance(x, jax.core.Tracer) else next(iter(x.devices())).platform


def _numpy_dtype(name: str) -> np.dtype[Any]:
    try:
        known: np.dtype[Any] = np.dtype(name)
        return known
    except TypeError:
        try:
            import ml_dtypes
        except ImportError as error:
            raise InvalidArgumentError(
                f"a NumPy array of {name} needs the package ml_dtypes: pip install ml_dtypes"
            ) from error
        added: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return added


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    block = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + nbytes].view(dtype).reshape(shape)


def new_of(library: str, dtype: str, shape: tuple[int, ...]) -> Any:
    """A new writable array to receive into, for what `library_of` named. Device memory is of the current device.

    For JAX it is NumPy memory, or our own device memory, that `finish` turns into a JAX array.
    """
    if library.startswith("torch"):
        import torch

        device = torch.device("cuda", torch.cuda.current_device()) if library == "torch gpu" else None
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    if library == "cupy":
        import cupy

        return cupy.empty(shape, _numpy_dtype(dtype))
    if library in ("gpu", "jax gpu"):
        return _on_device(dtype, shape, None)
    numpy_dtype = _numpy_dtype(dtype)
    return _aligned(shape, numpy_dtype) if library == "jax" else np.empty(shape, numpy_dtype)


def _on_device(dtype: str, shape: tuple[int, ...], stream: int | None, kind: str = "") -> DeviceArray:
    from samestep import devices
    from samestep.device_arrays import DeviceArray

    return DeviceArray(devices.current_gpu(kind), dtype, tuple(shape), stream=stream)


def new_like(x: Any, shape: tuple[int, ...] | None = None) -> Any:
    """A new writable array to receive into, with the dtype, library and (unless given) shape of `x`."""
    known = info(x)
    library = library_of(x)
    of_shape = known.shape if shape is None else shape
    if library == "gpu":
        from samestep.streams import stream_of

        return _on_device(known.dtype, of_shape, stream_of(x), known.device)
    return new_of(library, known.dtype, of_shape)


def fill_with_zeros(x: Any) -> None:
    """Set all elements of an array that `new_of` made."""
    _core.unpack(np.zeros(info(x).nbytes, np.uint8), [x])


def finish(x: Any, received: Any) -> Any:
    """What was received into `new_like(x)`, as an array of the library and device of `x`."""
    if not is_jax(x):
        return received
    if not isinstance(received, np.ndarray):
        return finish_for("jax gpu", received)
    return sys.modules["jax"].device_put(received, x.sharding)


def finish_for(library: str, received: Any) -> Any:
    """What was received into `new_of(library, ...)`, as an array of that library."""
    if library not in ("jax", "jax gpu"):
        return received
    import jax

    return jax.dlpack.from_dlpack(received) if library == "jax gpu" else jax.device_put(received)


def apart(x: Any, out: Any) -> Any:
    """`x`, or a copy of it where writing to `out` would change it."""
    if not _core.share_memory(x, out):
        return x
    own = new_like(x)
    copy(x, own, "sendrecv")
    return own


def copy(x: Any, out: Any, verb: str) -> None:
    """Copy the elements of `x` into `out`, whichever libraries and layouts they have.

    Raises:
      InvalidArgumentError: `out` has another dtype or shape, or cannot be written.
    """
    source, target = info(x), info(out)
    if (source.dtype, source.shape) != (target.dtype, target.shape):
        raise InvalidArgumentError(
            f"{verb}: out is {target.dtype}{list(target.shape)} but the input is {source.dtype}{list(source.shape)}"
        )
    block = np.empty(source.nbytes, np.uint8)
    _core.pack([x], block)
    _core.unpack(block, [out])

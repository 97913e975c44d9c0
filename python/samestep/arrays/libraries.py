"""The table of array libraries, and what finds a row: the place to add a library. And what makes arrays of a row.

No array library but NumPy is imported, except for what another rank sends arrays of: elsewhere an array exists only
where its library has been imported already.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from samestep import _core
from samestep._core import ArrayInfo
from samestep._util.dtypes import numpy_dtype
from samestep.arrays import of_jax, of_torch
from samestep.arrays.describe import Library, device_of, info, is_array, named_stream, order_of
from samestep.arrays.of_jax import sharding_of
from samestep.errors import InvalidArgumentError
from samestep.gpu.device_array import DeviceArray


def _modules(kind: type) -> list[str]:
    return [str(getattr(base, "__module__", "")).partition(".")[0] for base in kind.__mro__]


def _own(dtype: str, shape: tuple[int, ...], place: Any = None) -> DeviceArray:
    """`place` may be an array beside which it is made."""
    from samestep.gpu import runtime

    kind, stream = "", None
    if place is not None and not isinstance(place, int):
        kind, stream, place = info(place).device, _core.stream_of(place), device_of(place)
    return DeviceArray(runtime.current_gpu(kind), dtype, tuple(shape), device=place, stream=stream)


def _cupy(dtype: str, shape: tuple[int, ...], device: Any = None) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        return cupy.empty(shape, numpy_dtype(dtype))


_namespaces: dict[str, Any] = {}  # by name: of the arrays that this process has passed


def _in_namespace(namespace: Any, received: np.ndarray[Any, Any]) -> Any:
    dtype = received.dtype
    if dtype.isbuiltin == 1:  # NumPy exports no types of ml_dtypes
        made = namespace.from_dlpack(received)
        if str(made.dtype).rpartition(".")[2].removesuffix("_") == dtype.name:
            return made
    return namespace.asarray(received, dtype=getattr(namespace, dtype.name))  # MLX makes float32 of float64


def _tensorflow(tf: Any, received: np.ndarray[Any, Any]) -> Any:
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(received)


def _pyarrow(pa: Any, received: np.ndarray[Any, Any]) -> Any:
    return pa.array(received) if received.ndim == 1 else pa.Tensor.from_numpy(received)


def _standard(name: str, *, mutable: bool = False, make: Any = _in_namespace) -> Library:
    """The row of a library in host memory, by default of one that follows the Python array API standard."""

    def finish(received: Any, **_: Any) -> Any:
        # The memory becomes that of the array where the library makes no copy. A rank without it gets NumPy's array.
        if not isinstance(received, np.ndarray):
            return received
        namespace = _namespaces.get(name) or sys.modules.get(name)
        if namespace is None and name in _ROWS:
            with contextlib.suppress(ImportError):
                namespace = importlib.import_module(name)
        return received if namespace is None else make(namespace, received)

    return Library(name, mutable=mutable, finish=finish)


_NUMPY = Library("numpy", lambda x: isinstance(x, np.ndarray), flat=lambda x: x.reshape(-1))
_OWN = Library(
    "gpu",
    lambda x: isinstance(x, DeviceArray),
    mutable=True,
    new=_own,
    place=lambda x: None if info(x).device == "cpu" else x,
    flat=lambda x: x.flat() if isinstance(x, DeviceArray) else Library.flat(x),
    stream=lambda x: x.stream if isinstance(x, DeviceArray) else named_stream(x),
)
_CUPY = Library(
    "cupy",
    lambda x: "cupy" in _modules(type(x)),
    mutable=True,
    computes=True,
    new=_cupy,
    flat=lambda x: x.reshape(-1),  # still of that library, on which it depends what the core does
    stream=lambda x: named_stream(x, lambda: int(sys.modules["cupy"].cuda.get_current_stream().ptr)),
)
_ANYWHERE = (_NUMPY, _OWN, of_torch.TORCH, of_torch.ON_DEVICE, of_jax.JAX, of_jax.ON_DEVICE, _CUPY)
_ON_HOST = (
    _standard("array_api_strict", mutable=True),
    _standard("dpctl.tensor", mutable=True),
    _standard("dpnp", mutable=True),
    _standard("mlx.core"),
    _standard("paddle", mutable=True),
    _standard("pyarrow", make=_pyarrow),
    _standard("tensorflow", make=_tensorflow),
)
_ROWS = {row.name: row for row in (*_ANYWHERE, *_ON_HOST)}
_MUTABLE = {"samestep", *(row.name.partition(".")[0] for row in _ROWS.values() if row.mutable)}


def named(library: str) -> Library:
    """The row of that name, which this rank or another one has of an array."""
    return _ROWS.get(library) or _standard(library)


def of(x: Any) -> Library:
    """The row of the library that an array should be answered with."""
    if found := _holder(x):
        return found
    if hasattr(x, "__cuda_array_interface__") or info(x).device != "cpu":
        return _OWN
    if not hasattr(x, "__array_namespace__"):
        return next((row for module in _modules(type(x)) for row in _ON_HOST if row.name == module), _NUMPY)
    namespace = x.__array_namespace__()
    name = str(getattr(namespace, "__name__", type(x).__module__))
    _namespaces[name] = namespace
    return named(name)


def _holder(x: Any) -> Library | None:
    for row in _ANYWHERE:
        if row.holds(x):
            return row
    return None


def stream_of(x: Any) -> int | None:
    """The stream in which an array of device memory is written and read now, as the runtime's handle.

    None: no work is pending, or the stream that will use the array is unknown; then the host has to wait.

    torch: the current stream of the tensor's device. Arrays with `__cuda_array_interface__` (CuPy, Numba): the
    stream they name there, which for CuPy is the current one; the default stream where an older version of the
    interface names none. Numba names None for arrays of the legacy default stream. CuPy before version 14 has no
    interface with ROCm, and is asked for its current stream. Libraries with DLPack's C exchange API are asked for
    theirs before this is. Other arrays with DLPack: the default stream, as that protocol says. JAX, and what becomes an
    array of JAX: `jax_stream`, which waits for the array.

    Source: CUDA Array Interface, version 3, "Synchronization"; DLPack, "Stream handling".
    """
    return (_holder(x) or _OWN).stream(x)


def written_in_place(kind: type) -> bool | None:
    """Whether arrays of this class are written in place; None: if the memory says that it is writable.

    The arrays of an array library may share memory that the library counts on, so it has to be known for mutable ones.
    Anything else, such as a `bytearray` or a wrapper with `__dlpack__`, is the memory that it gives out.

    Example:
      >>> written_in_place(bytearray) is None
      True
    """
    if not _MUTABLE.isdisjoint(_modules(kind)):
        return True
    return False if hasattr(kind, "__array_namespace__") else None


def from_bytes(  # noqa: PLR0917 - what an array is
    data: np.ndarray[Any, Any] | None,
    library: str,
    dtype: str,
    shape: Sequence[int],
    device: int | None,
    order: Sequence[int] = (),
    *,
    like: Any = None,
) -> Any:
    """An array of its own from the bytes of its elements as they lie in memory; None: of zeros.

    It is on `device` as for `Library.new`; JAX commits it to where it has committed `like`, or to this sharding.
    `order`: of the axes in memory, as `_core.memory_order` names it, of libraries that compute on devices alone.
    """
    row = named(library)
    ones = [axis for axis, extent in enumerate(shape) if extent == 1]
    axes = [*ones, *order] if order else range(len(shape))
    made = row.new(dtype, tuple(shape[axis] for axis in axes), device)
    _core.unpack(np.zeros(info(made).nbytes, np.uint8) if data is None else data, [made])
    if order:
        places = tuple(axes.index(axis) for axis in range(len(shape)))
        made = (made.permute if hasattr(made, "permute") else made.transpose)(places)
    return row.finish(made, sharding=sharding_of(like) if is_array(like) else like)


def like_bytes(data: np.ndarray[Any, Any], like: Any, shape: tuple[int, ...]) -> Any:
    """An array of its own from the bytes of its elements, of the dtype and library of `like` and where that lies."""
    row = of(like)
    made = row.like(like, shape)
    _core.unpack(data, [made])
    return row.finish(made, like=like)


def converts(x: Any) -> bool:
    """Whether `x` holds 16-bit floats in device memory which its library can convert."""
    known = info(x)
    return known.device != "cpu" and known.dtype in ("float16", "bfloat16") and of(x).computes


def targets(xs: Sequence[Any], infos: Sequence[ArrayInfo]) -> list[Any]:
    """Where results for arrays go: the arrays, or new ones for those that cannot be written."""
    return [x if known.writable else of(x).like(x) for x, known in zip(xs, infos, strict=True)]


def deliver(xs: Any, infos: Sequence[ArrayInfo], which: Iterable[int], written: Sequence[Any]) -> None:
    """Put what `targets` gave for some arrays of a list, and now holds results, in place of those not writable."""
    for i, target in zip(which, written, strict=True):
        if not infos[i].writable:
            xs[i] = of(xs[i]).finish(target, like=xs[i])


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
    own = of(x).like(x)
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

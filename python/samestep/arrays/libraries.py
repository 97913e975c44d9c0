"""The table of array libraries, and what finds a row: the place to add a library.

No array library but NumPy is imported, except for what another rank sends arrays of: elsewhere an array exists only
where its library has been imported already.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

import numpy as np

from samestep import _core
from samestep._util.dtypes import numpy_dtype
from samestep.arrays import of_jax, of_torch
from samestep.arrays.describe import device_of, info
from samestep.arrays.library import Library, named_stream
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

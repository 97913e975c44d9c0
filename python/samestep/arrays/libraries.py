"""The table of array libraries: whose arrays are written in place, and how a library makes an array of host memory.

NumPy, torch, JAX, CuPy and memory of devices have functions of their own in `allocate`. A library that follows the
Python array API standard needs no entry: its arrays are never written, and its `from_dlpack` makes the results.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

_MUTABLE = frozenset({"array_api_strict", "cupy", "dpctl", "dpnp", "paddle", "samestep", "torch"})
_AS_RECEIVED = frozenset({"numpy", "cupy", "gpu"})

_namespaces: dict[str, Any] = {}  # by name: of the arrays that this process has passed


def written_in_place(kind: type) -> bool | None:
    """Whether arrays of this class are written in place; None: if the memory says that it is writable.

    The arrays of an array library may share memory that the library counts on, so it has to be known for mutable ones.
    Anything else, such as a `bytearray` or a wrapper with `__dlpack__`, is the memory that it gives out.

    Example:
      >>> written_in_place(bytearray) is None
      True
    """
    if any(module in _MUTABLE for module in _modules(kind)):
        return True
    return False if hasattr(kind, "__array_namespace__") else None


def host_library(x: Any) -> str:
    """The name for `from_host` of the library of `x`, an array in host memory; "numpy" if none is known."""
    if not hasattr(x, "__array_namespace__"):
        return next((module for module in _modules(type(x)) if module in _FROM_HOST), "numpy")
    namespace = x.__array_namespace__()
    name = str(getattr(namespace, "__name__", type(x).__module__))
    _namespaces[name] = namespace
    return name


def from_host(library: str, received: Any) -> Any:
    """What was received into NumPy memory, as an array of a library that `host_library` named.

    The memory becomes that of the array where the library makes no copy. A rank without the library gets NumPy's array.
    """
    if library in _AS_RECEIVED or not isinstance(received, np.ndarray):
        return received
    make = _FROM_HOST.get(library, _in_namespace)
    namespace = _namespaces.get(library) or sys.modules.get(library)
    if namespace is None and library in _FROM_HOST:
        try:
            namespace = importlib.import_module(library)
        except ImportError:
            return received
    return make(namespace, received) if namespace is not None else received


def _modules(kind: type) -> list[str]:
    return [str(getattr(base, "__module__", "")).partition(".")[0] for base in kind.__mro__]


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


_FROM_HOST: dict[str, Callable[[Any, np.ndarray[Any, Any]], Any]] = {
    "array_api_strict": _in_namespace,
    "mlx.core": _in_namespace,
    "pyarrow": _pyarrow,
    "tensorflow": _tensorflow,
}
"""Libraries that a rank imports when others send arrays of theirs, as torch and JAX, and what makes their arrays."""

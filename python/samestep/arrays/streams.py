"""In which stream of a GPU the library of an array works on it."""

from __future__ import annotations

import sys
from typing import Any

from samestep.gpu.device_array import DeviceArray

__all__ = ["stream_of"]

_DEFAULT = 0


def stream_of(x: Any) -> int | None:
    """The stream in which an array of device memory is written and read now, as the runtime's handle.

    None: no work is pending, or the stream that will use the array is unknown; then the host has to wait.

    torch: the current stream of the tensor's device. Arrays with `__cuda_array_interface__` (CuPy, Numba): the
    stream they name there, which for CuPy is the current one; the default stream where an older version of the
    interface names none. Numba names None for arrays of the legacy default stream. Libraries with DLPack's C exchange
    API are asked for their current stream before this is. Other arrays with DLPack: the default stream, as that
    protocol says. JAX waits for its arrays before it hands them out, and for what it takes in it needs the host to
    wait.

    Source: CUDA Array Interface, version 3, "Synchronization"; DLPack, "Stream handling".
    """
    if type(x) is DeviceArray:
        return x.stream
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return int(torch.cuda.current_stream(x.device).cuda_stream)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):
        return None
    interface = getattr(x, "__cuda_array_interface__", None)
    if isinstance(interface, dict) and "stream" in interface:
        stream = interface["stream"]
        return None if stream is None else int(stream)
    return _DEFAULT

"""The GPU stream in which an array's library works on it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from samestep.gpu.device_array import DeviceArray

_DEFAULT = 0

_for_jax: dict[int, int] = {}  # by device


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
    if isinstance(x, DeviceArray):
        return x.stream
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return torch_streams()(x.get_device())
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):
        return jax_stream(x)
    interface = getattr(x, "__cuda_array_interface__", None)
    if isinstance(interface, dict) and "stream" in interface:
        stream = interface["stream"]
        # The interface numbers the default stream 1. CUDA also accepts 0; for ROCm it is 0, and 1 may be invalid.
        return None if stream is None else _DEFAULT if stream == 1 else int(stream)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        return int(cupy.cuda.get_current_stream().ptr)
    return _DEFAULT


def torch_streams() -> Callable[[int], int]:
    """What returns the current stream of a device of torch, given its number.

    It is what torch's compiler calls, too: `torch.cuda.current_stream` makes a Stream for it, which takes 4 us.
    """
    import torch

    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


def jax_stream(x: Any) -> int | None:
    """The stream of ours that `x.__dlpack__(stream=...)` lets wait until the JAX array `x` is computed.

    None for host memory. Each device has one.

    Source: jax.Array.__dlpack__, "stream".
    """
    device = next(iter(x.devices()))
    if device.platform not in ("gpu", "cuda", "rocm"):
        return None
    from samestep.gpu import runtime

    index = int(device.local_hardware_id)
    if index not in _for_jax:  # of the streams that several threads make here one stays
        _for_jax.setdefault(index, runtime.current_gpu().make_stream(index))
    return _for_jax[index]

"""Arrays of JAX. New ones are NumPy memory, or an array in device memory that nobody else has yet."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from samestep import _core
from samestep._util.dtypes import numpy_dtype
from samestep._util.loaded import is_a
from samestep.arrays.describe import Library
from samestep.errors import InvalidArgumentError
from samestep.gpu.device_array import DeviceArray

_ALIGNMENT = 64  # JAX uses NumPy memory without a copy only if it is aligned so
_GPUS = ("gpu", "cuda", "rocm")

_streams: dict[int, int] = {}  # by device


def is_jax(x: Any) -> bool:
    """Whether `x` is a JAX array (a tracer counts too)."""
    return is_a(x, "jax", "Array")


def _device(x: Any) -> Any:
    return next(iter(x.devices()))


def _is_on_gpu(x: Any) -> bool:
    return not isinstance(x, sys.modules["jax"].core.Tracer) and _device(x).platform in _GPUS


def _aligned(dtype: str, shape: tuple[int, ...], device: Any = None) -> np.ndarray[Any, Any]:
    known = numpy_dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * known.itemsize
    block = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + nbytes].view(known).reshape(shape)


def _finish(received: Any, sharding: Any = None, like: Any = None) -> Any:
    import jax

    if like is not None:
        sharding = sharding_of(like)
    if len(getattr(sharding, "spec", ())) > len(received.shape):  # replicated: the same place for fewer axes
        replicated = jax.sharding.PartitionSpec()
        sharding = jax.sharding.NamedSharding(sharding.mesh, replicated, memory_kind=sharding.memory_kind)
    if not isinstance(received, np.ndarray):
        if sharding is None:
            return received.array
        received = received.array
    default = jax.default_device(_device(like)) if like is not None and sharding is None else nullcontext()
    with default, keeping_dtype(received):
        return jax.device_put(received, sharding)


def sharding_of(x: Any) -> Any:
    """The sharding of an array that JAX has committed to its devices; None for all else.

    Only what is committed may not be moved: JAX computes with other arrays wherever their partners are.
    """
    return x.sharding if is_jax(x) and x.committed else None


def as_received(x: Any) -> Any:
    """What other ranks receive of an array: JAX's without the weak type that a Python number gives it."""
    if not is_jax(x) or not x.weak_type:
        return x
    with keeping_dtype(x):
        return x.astype(x.dtype)


def keeping_dtype(x: Any) -> AbstractContextManager[Any]:
    """Where JAX makes arrays like `x`, an array of its own or of NumPy: it cuts to 32 bits outside of `enable_x64`."""
    jax = sys.modules["jax"]
    if jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype:
        return nullcontext()
    enable_x64: Any = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    made: AbstractContextManager[Any] = enable_x64(True)
    return made


def jax_stream(x: Any) -> int | None:
    """The stream of ours that `x.__dlpack__(stream=...)` lets wait until the JAX array `x` is computed.

    None for host memory. Each device has one.

    Source: jax.Array.__dlpack__, "stream".
    """
    device = _device(x)
    if device.platform not in _GPUS:
        return None
    from samestep.gpu import runtime

    index = int(device.local_hardware_id)
    if index not in _streams:  # of the streams that several threads make here one stays
        _streams.setdefault(index, runtime.current_gpu().make_stream(index))
    return _streams[index]


class _Memory:
    """The memory of a JAX array, which it keeps alive."""

    def __init__(self, array: Any) -> None:
        self.array = array
        # Exported as an input is: a stream of ours, not the host, waits until XLA has filled the array. XLA does so in
        # the stream in which it computes, where an input may be far ahead.
        view = _core.view_info(array)
        self.nbytes, self.device, self.address = view.nbytes, view.device_index, view.address


class UnsharedJaxArray(DeviceArray):
    """A JAX array in device memory that nobody else has, so that it may still be written: from XLA's own pool.

    Before the host hands it on as `array`, it waits for what writes it: XLA has no stream that could.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...], device: Any = None) -> None:
        """`device`: one of JAX's or the runtime's index of one (None: the runtime's current device)."""
        import jax

        from samestep.gpu import runtime

        gpu = runtime.current_gpu()
        if device is None or isinstance(device, int):
            index = gpu.current_device() if device is None else device
            device = next(d for d in jax.local_devices() if int(d.local_hardware_id) == index)
        with jax.default_device(device):
            array = jax.numpy.empty(shape, dtype)
        if str(array.dtype) != dtype:
            raise InvalidArgumentError(
                f"JAX makes {array.dtype} of {dtype}; set jax_enable_x64, or pass an array of another library as out="
            )
        self.array = array
        self._memory = _Memory(array)  # type: ignore[assignment]
        self._gpu = gpu
        self.dtype, self.shape, self.stream = dtype, tuple(shape), jax_stream(array)


JAX = Library("jax", lambda x: is_jax(x) and not _is_on_gpu(x), new=_aligned, finish=_finish)
ON_DEVICE = Library(
    "jax gpu",
    lambda x: is_jax(x) and _is_on_gpu(x),
    new=UnsharedJaxArray,
    place=_device,
    finish=_finish,
    flat=lambda x: x.reshape(-1),
    stream=jax_stream,
)

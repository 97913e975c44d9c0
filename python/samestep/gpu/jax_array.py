"""New arrays of JAX in device memory, to receive into."""

from __future__ import annotations

from typing import Any

from samestep.errors import InvalidArgumentError
from samestep.gpu import runtime
from samestep.gpu.device_array import DeviceArray

__all__ = ["UnsharedJaxArray"]


class _Memory:
    """The memory of a JAX array, which it keeps alive."""

    def __init__(self, array: Any, device: int) -> None:
        self.array = array
        self.address = int(array.unsafe_buffer_pointer())
        self.nbytes = int(array.nbytes)
        self.device = device


class UnsharedJaxArray(DeviceArray):
    """A JAX array that nobody else has, so that it may still be written. Its memory is from XLA's own pool.

    The host waits before it is handed on as `array`: XLA has no stream that could.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...], device: Any = None) -> None:
        """An array on `device`, one of JAX's (None: the one that is the runtime's current device)."""
        import jax

        gpu = runtime.current_gpu()
        if device is None:
            current = gpu.current_device()
            device = next(d for d in jax.local_devices() if int(d.local_hardware_id) == current)
        with jax.default_device(device):
            array = jax.numpy.empty(shape, dtype)
        if str(array.dtype) != dtype:
            raise InvalidArgumentError(
                f"JAX makes {array.dtype} of {dtype}; set jax_enable_x64, or pass an array of another library as out="
            )
        array.block_until_ready()  # XLA fills it
        self.array = array
        self._memory = _Memory(array, int(device.local_hardware_id))  # type: ignore[assignment]
        self._kind = gpu.kind
        self.dtype, self.shape, self.stream = dtype, tuple(shape), None

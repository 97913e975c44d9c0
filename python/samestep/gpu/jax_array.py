"""New arrays of JAX in device memory, to receive into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samestep import _core
from samestep.errors import InvalidArgumentError
from samestep.gpu import runtime
from samestep.gpu.device_array import DeviceArray


class _Memory:
    """The memory of a JAX array, which it keeps alive."""

    def __init__(self, array: Any) -> None:
        self.array = array
        # Exported as an input is: a stream of ours, not the host, waits until XLA has filled the array. XLA does so in
        # the stream in which it computes, where an input may be far ahead.
        view = _core.view_info(array)
        self.nbytes, self.device, self.address = view.nbytes, view.device_index, view.address


class UnsharedJaxArray(DeviceArray):
    """A JAX array that nobody else has, so that it may still be written. Its memory is from XLA's own pool.

    Before the host hands it on as `array`, it waits for what writes it: XLA has no stream that could.
    """

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        device: Any = None,
        *,
        stream_of: Callable[[Any], int | None],
    ) -> None:
        """An array on `device`, one of JAX's or the runtime's index of one (None: the runtime's current device).

        `stream_of` gives the stream that an export of a JAX array lets wait for it.
        """
        import jax

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
        self.dtype, self.shape, self.stream = dtype, tuple(shape), stream_of(array)

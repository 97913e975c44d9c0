"""Arrays of our own in device memory, for libraries that cannot be asked for new ones."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np

from samestep import _core
from samestep._util.dtypes import numpy_dtype

_DLPACK_DEVICES = {"cuda": 2, "rocm": 10}
_DEFAULT = 0  # the runtime's handle of the (legacy) default stream


def _consumer_stream(stream: int | None, kind: str) -> int:
    """The handle of the stream that the consumer of an array names, which is not -1.

    Source: Python array API standard, `array.__dlpack__`, "stream".
    """
    if stream is None or stream == (1 if kind == "cuda" else 0):
        return _DEFAULT
    if stream < (2 if kind == "cuda" else 3):
        raise BufferError(f"__dlpack__: DLPack knows no stream {stream} of {kind}")
    return stream


class DeviceArray:
    """Device memory with a dtype and a shape, contiguous and writable, not initialised.

    It does nothing but hold elements: hand it to a library that takes `__cuda_array_interface__` or DLPack. Its memory
    is freed with the last array that uses it, and to free memory waits for all that the device is doing (cudaFree,
    hipFree): in a loop pass `out=` and let results be written to the same array.
    """

    def __init__(
        self,
        gpu: _core.GpuLibrary,
        dtype: str,
        shape: tuple[int, ...],
        *,
        device: int | None = None,
        stream: int | None = None,
    ) -> None:
        """An array on `device` (None: the current one) that is used in `stream` (None: by the host's order)."""
        self._memory = gpu.allocate(
            math.prod(shape) * _core.itemsize(dtype), gpu.current_device() if device is None else device
        )
        self._gpu = gpu
        self.dtype = dtype
        self.shape = shape
        self.stream = stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.startswith(("bfloat", "float8")):
            raise AttributeError(f"__cuda_array_interface__ has no {self.dtype}")
        return {
            "shape": self.shape,
            "typestr": np.dtype(self.dtype).str,
            "data": (self._memory.address, False),
            "version": 3,
            "strides": None,
            "stream": None if self.stream is None else self.stream or 1,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_DEVICES[self._gpu.kind], self._memory.device

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        """A capsule. Once it is made, `stream` is ordered after the work that fills the array."""
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("DeviceArray makes no copies; use numpy()")
        memory = self._memory
        if stream != -1 and self.stream is not None:
            later = _consumer_stream(stream, self._gpu.kind)
            if later != self.stream:
                self._gpu.order_streams(memory.device, later, self.stream)
        versioned = max_version is not None and max_version[0] >= 1
        return _core.to_dlpack(
            memory, memory.address, self.dtype, self.shape, self._gpu.kind, memory.device, versioned
        )

    def flat(self) -> DeviceArray:
        """The same memory as an array of one dimension."""
        view = copy.copy(self)
        view.shape = (math.prod(self.shape),)
        return view

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy on the host, once what is in the array's stream has ended."""
        host: np.ndarray[Any, Any] = np.empty(self.shape, numpy_dtype(self.dtype))
        _core.pack([self], host.view(np.uint8) if host.ndim else host)
        return host

    def __repr__(self) -> str:
        return f"<samestep.DeviceArray: {self.dtype}{list(self.shape)} on {self._gpu.kind} {self._memory.device}>"


class FlatView:
    """The elements of a contiguous array in device memory, as one dimension."""

    def __init__(self, array: Any, count: int) -> None:
        self._array = array
        self._shape = (count,)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._array.__cuda_array_interface__, "shape": self._shape, "strides": None}

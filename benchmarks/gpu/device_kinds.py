"""Arrays in device memory for the kit: those of torch, of CuPy, or of the stand-ins in tests/fakes, behind one face."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

_SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {}
}
"""
_CYCLES = 1.5e9  # a second's worth, about


class Torch:
    """Tensors of torch, in its current stream."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no device")
        self.module = torch

    def of(self, values: np.ndarray[Any, Any], dtype: str = "") -> Any:
        tensor = self.module.from_numpy(np.array(values)).cuda()
        return tensor.to(self.module.bfloat16) if dtype == "bfloat16" else tensor

    def get(self, x: Any) -> np.ndarray[Any, Any]:
        return (x.float() if x.dtype is self.module.bfloat16 else x).cpu().numpy()

    def fill(self, x: Any, value: float) -> None:
        x.fill_(value)

    def copy(self, to: Any, source: Any) -> None:
        to.copy_(source)

    def pinned(self, nbytes: int) -> Any:
        return self.module.empty(nbytes, dtype=self.module.uint8, pin_memory=True)

    def to_host(self, x: Any, pinned: Any) -> None:
        pinned.view(x.dtype)[: x.numel()].copy_(x, non_blocking=True)

    def from_host(self, x: Any, pinned: Any) -> None:
        x.copy_(pinned.view(x.dtype)[: x.numel()], non_blocking=True)

    @property
    def stream(self) -> int:
        return int(self.module.cuda.current_stream().cuda_stream)

    def busy(self, seconds: float) -> None:
        self.module.cuda._sleep(int(seconds * _CYCLES))

    def idle(self) -> bool:
        return bool(self.module.cuda.current_stream().query())

    def synchronize(self) -> None:
        self.module.cuda.synchronize()

    def captured(self, body: Callable[[Any], None], x: Any) -> Callable[[], None]:
        """Records what `body` does with x in a stream of its own, and returns what does it.

        `torch.cuda.graph` waits for the device before it begins, after which no operation would be pending.
        """
        graph = self.module.cuda.CUDAGraph()
        gc.collect()  # what is freed within a capture may end it
        with self.module.cuda.stream(self.module.cuda.Stream()):
            graph.capture_begin()
            try:
                body(x)
            finally:
                graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

    def used(self) -> int:
        """Bytes of the device in use, by whomever."""
        free, total = self.module.cuda.mem_get_info()
        return int(total - free)


class CuPy:
    """Arrays of CuPy, in its current stream."""

    name = "cupy"

    def __init__(self) -> None:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() == 0:
            raise RuntimeError("CuPy sees no device")
        self.module = cupy
        self._spin = cupy.RawKernel(_SPIN, "spin")

    def of(self, values: np.ndarray[Any, Any], dtype: str = "") -> Any:
        if dtype == "bfloat16":
            raise TypeError("CuPy has no bfloat16")
        return self.module.asarray(values)

    def get(self, x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(self.module.asnumpy(self.module.asarray(x)))

    def fill(self, x: Any, value: float) -> None:
        x.fill(value)

    def copy(self, to: Any, source: Any) -> None:
        self.module.copyto(to, source)

    def pinned(self, nbytes: int) -> Any:
        import cupyx

        return cupyx.empty_pinned((nbytes,), np.uint8)

    def to_host(self, x: Any, pinned: Any) -> None:
        x.get(out=pinned[: x.nbytes].view(x.dtype).reshape(x.shape), blocking=False)

    def from_host(self, x: Any, pinned: Any) -> None:
        x.set(pinned[: x.nbytes].view(x.dtype).reshape(x.shape))

    @property
    def stream(self) -> int:
        return int(self.module.cuda.get_current_stream().ptr)

    def busy(self, seconds: float) -> None:
        self._spin((1,), (1,), (np.int64(seconds * _CYCLES),))

    def idle(self) -> bool:
        return bool(self.module.cuda.get_current_stream().done)

    def synchronize(self) -> None:
        self.module.cuda.Device().synchronize()

    def used(self) -> int:
        free, total = self.module.cuda.runtime.memGetInfo()
        return int(total - free)


class Fakes:
    """Arrays of the stand-ins, in one stream of their own."""

    name = "fakes"

    def __init__(self) -> None:
        import fake_arrays

        self._fakes = fake_arrays
        self._stream = fake_arrays.Stream()

    def of(self, values: np.ndarray[Any, Any], dtype: str = "") -> Any:
        if dtype == "bfloat16":
            raise TypeError("the stand-ins' arrays have no bfloat16 in a stream")
        return self._fakes.Array.of(np.array(values), self._stream)

    def get(self, x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(x.get() if isinstance(x, self._fakes.Array) else x.numpy())

    def fill(self, x: Any, value: float) -> None:
        x.set(np.full(x.shape, value, x.dtype))

    def copy(self, to: Any, source: Any) -> None:
        to._copy(to.address, source.address)

    def pinned(self, nbytes: int) -> Any:
        return np.empty(nbytes, np.uint8)

    def to_host(self, x: Any, pinned: Any) -> None:
        x._copy(pinned.ctypes.data, x.address)

    def from_host(self, x: Any, pinned: Any) -> None:
        x._copy(x.address, pinned.ctypes.data)

    @property
    def stream(self) -> int:
        return int(self._stream.handle or 0)

    def busy(self, seconds: float) -> None:
        self._stream.delay(int(seconds * 1e6))

    def idle(self) -> bool:
        handle = self._fakes.ctypes.c_void_p(self._stream.handle)
        return bool(self._fakes.runtime().cudaStreamQuery(handle) == 0)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def captured(self, body: Callable[[Any], None], x: Any) -> Callable[[], None]:
        seen = x.part(0, x.shape[0])
        seen.stream = self._fakes.Stream()
        with self._fakes.Graph(seen.stream) as graph:
            body(seen)
        kept = [seen, seen._kept]  # a replay reads it

        def replay() -> None:
            assert kept
            graph.launch(self._stream)

        return replay

    def used(self) -> int:
        """Blocks, streams and events that exist."""
        return sum(self._fakes.counts())


def address(x: Any) -> int:
    """Where an array begins."""
    if hasattr(x, "data_ptr"):
        return int(x.data_ptr())
    return int(x.__cuda_array_interface__["data"][0])


def on_fakes() -> bool:
    return "libfake_" in os.environ.get("SAMESTEP_CUDART_LIBRARY", "")


def wanted() -> str:
    """The library that was asked for, or ""."""
    return os.environ.get("KIT_ARRAYS", "")


def choose() -> Any:
    """The first library that reaches the device; raises RuntimeError with each one's reason."""
    if on_fakes() and not wanted():
        return Fakes()
    if on_fakes():
        import fake_frameworks

        fake_frameworks.pretend(wanted())
    reasons = []
    for kind in (Torch, CuPy):
        if wanted() not in ("", kind.name):
            continue
        try:
            return kind()
        except Exception as error:  # a broken installation fails in any manner
            reasons.append(f"{kind.__name__}: {error}")
    raise RuntimeError("no library reaches the device; " + "; ".join(reasons))


def busy_really(arrays: Any) -> float:
    """Seconds for which `busy(0.2)` keeps the stream busy: clocks differ."""
    arrays.synchronize()
    begin = time.perf_counter()
    arrays.busy(0.2)
    arrays.synchronize()
    return time.perf_counter() - begin

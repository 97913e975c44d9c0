"""What torch.cuda and CuPy offer, on the fake runtime whose device memory the host reaches.

Enough for the kit of benchmarks/gpu: each array lies in device memory, all but kernels is done at once, and a stream
only knows whether it was kept busy since somebody waited for it. To samestep these are arrays of the host.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
from typing import Any

import numpy as np


def pretend(library: str) -> None:
    """Let this process find a device through "torch" or "cupy"."""
    os.environ["FAKE_GPU_HOST_ACCESS"] = "1"
    {"torch": _torch, "cupy": _cupy}[library]()


class Stream:
    """The only one."""

    cuda_stream = ptr = 0

    def __init__(self) -> None:
        self.busy = False

    def query(self) -> bool:
        return not self.busy

    done = property(query)

    def synchronize(self) -> None:
        import fake_arrays

        fake_arrays.DEFAULT.synchronize()
        self.busy = False

    def use(self) -> None:  # as the only device
        pass


def _on_device(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same elements in device memory, which is never freed."""
    import fake_arrays

    memory = ctypes.c_void_p()
    fake_arrays.call("Malloc", ctypes.byref(memory), ctypes.c_size_t(max(values.nbytes, 1)))
    nbytes = (ctypes.c_char * values.nbytes).from_address(memory.value or 0)
    made = np.frombuffer(nbytes, values.dtype).reshape(values.shape)
    made[...] = values
    return made


def _later(function: Any) -> Any:
    """The same once the kernels in the stream have ended."""

    def call(*args: Any, **kwargs: Any) -> Any:
        import fake_arrays

        fake_arrays.DEFAULT.synchronize()
        return function(*args, **kwargs)

    return call


def _torch() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    stream, begin, empty = Stream(), dist.init_process_group, torch.empty
    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.synchronize = lambda device=None: stream.synchronize()
    torch.cuda.mem_get_info = lambda device=None: (0, _used())
    torch.cuda._sleep = lambda cycles: setattr(stream, "busy", True)
    torch.Tensor.cuda = lambda self: torch.from_numpy(_on_device(self.numpy()))
    for name in ("fill_", "copy_", "cpu"):
        setattr(torch.Tensor, name, _later(getattr(torch.Tensor, name)))
    torch.nn.Module.cuda = lambda self: self
    torch.empty = lambda *shape, **more: empty(*shape, **{k: v for k, v in more.items() if k != "pin_memory"})
    dist.init_process_group = lambda kind, **more: begin("gloo" if kind == "nccl" else kind, **more)


def _used() -> int:
    import fake_arrays

    return sum(fake_arrays.counts())


class _Array(np.ndarray):  # type: ignore[type-arg]
    fill = _later(np.ndarray.fill)

    def get(self, out: Any = None, blocking: bool = True) -> Any:
        out[...] = self
        return out

    def set(self, values: Any) -> None:
        self[...] = values

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.__array_interface__, "version": 3, "stream": 1}


class _Kernel:
    def __init__(self, text: str, name: str) -> None:
        assert name in text

    def __call__(self, grid: Any, block: Any, args: Any) -> None:
        sys.modules["cupy"].cuda.get_current_stream().busy = True


def _cupy() -> None:
    stream = Stream()
    cupy, cupyx = types.ModuleType("cupy"), types.ModuleType("cupyx")
    cupy.RawKernel = _Kernel
    cupy.asarray = lambda x: x if isinstance(x, _Array) else _on_device(_host(x)).view(_Array)
    cupy.asnumpy = _later(lambda x: np.array(x.view(np.ndarray)))
    cupy.copyto = _later(np.copyto)
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: int("CUPY_HAS_NO_DEVICE" not in os.environ), memGetInfo=lambda: (0, _used())
    )
    cupy.cuda = types.SimpleNamespace(
        runtime=runtime, get_current_stream=lambda: stream, Device=lambda device=0: stream
    )
    cupyx.empty_pinned = np.empty
    sys.modules.update(cupy=cupy, cupyx=cupyx)


def _host(x: Any) -> np.ndarray[Any, Any]:
    return np.asarray(x.numpy() if hasattr(x, "numpy") else x)

"""What this package needs of JAX on a GPU, on the stand-in of the runtime: `sys.modules["jax"]` while it is installed.

As in jaxlib: arrays cannot be written; `__dlpack__` waits on the host unless it is given a stream, which then waits
until the array is computed, and is never -1; memory comes from a pool and no array frees any.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import fake_arrays
import numpy as np
from samestep import _core

_free: dict[int, list[fake_arrays.Array]] = {}


class Device:
    """The one that is the runtime's current device."""

    platform = "gpu"

    @property
    def local_hardware_id(self) -> int:
        device = ctypes.c_int()
        fake_arrays.call("GetDevice", ctypes.byref(device))
        return device.value


DEVICE = Device()


@functools.cache
def compute() -> fake_arrays.Stream:
    """XLA's stream, which no other library knows."""
    return fake_arrays.Stream()


class Array:
    """Read-only memory that the compute stream writes."""

    waits_on_host = 0  # how often an export has waited on the host

    def __init__(self, memory: fake_arrays.Array, shape: tuple[int, ...], dtype: Any) -> None:
        self._memory, self.shape, self.dtype = memory, tuple(shape), np.dtype(dtype)
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        self.sharding = types.SimpleNamespace(device_set={DEVICE})
        self.is_fully_replicated, self.committed = True, False

    def devices(self) -> set[Device]:
        return {DEVICE}

    def block_until_ready(self) -> Array:
        compute().synchronize()
        return self

    def unsafe_buffer_pointer(self) -> int:
        return self._memory.address

    def reshape(self, *shape: int) -> Array:
        """A copy, as XLA may make one, in the compute stream."""
        made = empty(np.empty(self.shape, "V0").reshape(shape).shape, self.dtype)
        places = ctypes.c_void_p(made._memory.address), ctypes.c_void_p(self._memory.address)
        stream = ctypes.c_void_p(compute().handle)
        fake_arrays.call("MemcpyAsync", *places, ctypes.c_size_t(self.nbytes), 4, stream)
        return made

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, DEVICE.local_hardware_id

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        if stream is None:
            Array.waits_on_host += 1
            compute().synchronize()
        else:
            assert stream > 2, "XLA takes the number for a handle"
            fake_arrays.let_wait(fake_arrays.Stream(stream), compute())
        return _core.to_dlpack(
            self, self._memory.address, self.dtype.name, self.shape, "cuda", DEVICE.local_hardware_id, False
        )

    def get(self) -> np.ndarray[Any, Any]:
        values = np.empty(self.shape, self.dtype)
        fake_arrays.call(
            "MemcpyAsync",
            ctypes.c_void_p(values.ctypes.data),
            ctypes.c_void_p(self._memory.address),
            ctypes.c_size_t(self.nbytes),
            4,
            ctypes.c_void_p(compute().handle),
        )
        compute().synchronize()
        return values

    def __del__(self) -> None:
        if getattr(self, "_memory", None) is not None:
            _free.setdefault(self._memory.nbytes, []).append(self._memory)


Array.__module__ = "jaxlib.stand_in"


def _memory(nbytes: int) -> fake_arrays.Array:
    kept = _free.get(nbytes)
    return kept.pop() if kept else fake_arrays.Array((nbytes,), "uint8", compute())


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """JAX fills it with zeros, in the compute stream."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = _memory(nbytes)
    memory.set(np.zeros(nbytes, "uint8"))
    return Array(memory, shape, dtype)


def late(values: np.ndarray[Any, Any], microseconds: int | None = 20_000) -> Array:
    """Values that are computed so much later; None: once the compute stream is released."""
    memory = _memory(values.nbytes)
    memory.set(np.full(values.nbytes, 0xEE, "uint8"))
    compute().hold() if microseconds is None else compute().delay(microseconds)
    memory.set(np.frombuffer(values.tobytes(), "uint8"))
    return Array(memory, values.shape, values.dtype)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`import jax` gives this module."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "jax"}
    made = types.ModuleType("jax")
    made.Array, made.core = Array, types.SimpleNamespace(Tracer=type("Tracer", (), {}))
    made.numpy = types.SimpleNamespace(empty=empty)
    made.local_devices = lambda: [DEVICE]
    made.default_device = lambda device: contextlib.nullcontext()
    sys.modules["jax"] = made
    try:
        yield
    finally:
        del sys.modules["jax"]
        sys.modules.update(hidden)

"""What this package needs of JAX on GPUs, on the stand-in of the runtime: `sys.modules["jax"]` while it is installed.

As in jaxlib: arrays cannot be written; `__dlpack__` waits on the host unless it is given a stream, which then waits
until the array is computed, and is never -1; memory comes from a pool and no array frees any; each process has all
devices, unless it is told which, and makes arrays on the first of them, unless another one is the default.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import fake_arrays
import numpy as np
from samestep import _core
from samestep.gpu import jax_devices

_free: dict[tuple[Device, int], list[fake_arrays.Array]] = {}


class Config:
    """`jax.config`."""

    jax_platforms: str | None = None
    jax_default_device: Device | None = None

    def __init__(self) -> None:
        self.values = {"jax_cuda_visible_devices": "all"}

    def update(self, name: str, value: Any) -> None:
        if name in self.values:
            self.values[name] = value
        else:
            setattr(self, name, value)


CONFIG = Config()


class Device:
    platform = "gpu"

    def __init__(self, index: int) -> None:
        self.local_hardware_id = index

    @contextlib.contextmanager
    def selected(self) -> Iterator[None]:
        before = fake_arrays.current_device()
        fake_arrays.call("SetDevice", self.local_hardware_id)
        try:
            yield
        finally:
            fake_arrays.call("SetDevice", before)


@functools.cache
def devices() -> list[Device]:
    """Made when they are first used; JAX takes memory of each."""
    jax_devices.initialize()
    count = ctypes.c_int()
    fake_arrays.call("GetDeviceCount", ctypes.byref(count))
    shown = CONFIG.values["jax_cuda_visible_devices"]
    made = [Device(i) for i in (range(count.value) if shown == "all" else map(int, shown.split(",")))]
    for device in made:
        with device.selected():
            fake_arrays.POOL.take(1, fake_arrays.DEFAULT)
    return made


def default_device() -> Device:
    return CONFIG.jax_default_device or devices()[0]


@functools.cache
def _compute(device: Device) -> fake_arrays.Stream:
    with device.selected():
        return fake_arrays.Stream()


def compute() -> fake_arrays.Stream:
    """XLA's stream of the default device, which no other library knows."""
    return _compute(default_device())


class Export:
    """What holds an array's memory outside of JAX, so that JAX does not use it again."""

    def __init__(self, array: Array) -> None:
        self.array = array


class Array:
    """Read-only memory that the compute stream writes."""

    waits_on_host = 0  # how often an export has waited on the host

    def __init__(self, memory: fake_arrays.Array, shape: tuple[int, ...], dtype: Any) -> None:
        self._memory, self.shape, self.dtype = memory, tuple(shape), np.dtype(dtype)
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        self.device = default_device()
        self.exports: weakref.WeakSet[Export] = weakref.WeakSet()
        self.sharding = types.SimpleNamespace(device_set={self.device})
        self.is_fully_replicated, self.committed = True, False

    def devices(self) -> set[Device]:
        return {self.device}

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
        return 2, self.device.local_hardware_id

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        if stream is None:
            Array.waits_on_host += 1
            compute().synchronize()
        else:
            assert stream > 2, "XLA takes the number for a handle"
            fake_arrays.let_wait(fake_arrays.Stream(stream), compute())
        export = Export(self)
        self.exports.add(export)
        place = self._memory.address, self.dtype.name, self.shape, "cuda", self.device.local_hardware_id
        return _core.to_dlpack(export, *place, False)

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
            _free.setdefault((self.device, self._memory.nbytes), []).append(self._memory)


Array.__module__ = "jaxlib.stand_in"


def _memory(nbytes: int) -> fake_arrays.Array:
    kept = _free.get((default_device(), nbytes))
    if kept:
        return kept.pop()
    with default_device().selected():
        return fake_arrays.Array((nbytes,), "uint8", compute())


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


def donate(x: Array, values: np.ndarray[Any, Any]) -> Array:
    """The result of a jitted function that may write it to `x`: elsewhere while `x` is exported."""
    memory, x._memory = x._memory, None  # type: ignore[assignment]
    if x.exports:
        kept, memory = memory, _memory(values.nbytes)
        for export in x.exports:
            weakref.finalize(export, _free.setdefault((x.device, kept.nbytes), []).append, kept)
    memory.set(np.frombuffer(values.tobytes(), "uint8"))
    return Array(memory, values.shape, values.dtype)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`import jax` gives this module."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "jax"}
    made: Any = types.ModuleType("jax")
    made._src = types.ModuleType("jax._src")
    made._src.config = types.ModuleType("jax._src.config")
    made.config = CONFIG
    made.Array, made.core = Array, types.SimpleNamespace(Tracer=type("Tracer", (), {}))
    made.numpy = types.SimpleNamespace(empty=empty)
    made.local_devices = devices
    made.default_device = _default
    parts = {"jax": made, "jax._src": made._src, "jax._src.config": made._src.config}
    sys.modules.update(parts)
    try:
        yield
    finally:
        for name in parts:
            del sys.modules[name]
        sys.modules.update(hidden)


@contextlib.contextmanager
def _default(device: Device) -> Iterator[None]:
    before = CONFIG.jax_default_device
    CONFIG.jax_default_device = device
    try:
        yield
    finally:
        CONFIG.jax_default_device = before

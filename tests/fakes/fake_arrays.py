"""A minimal array library on the fake runtime: device memory, streams, copies, and the protocols for others."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import time
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import fake_libraries
import numpy as np
import real_libraries
from samestep import _core


@functools.cache
def runtime(hip: bool = False) -> Any:
    if real_libraries.wanted():
        return real_libraries.Runtime()
    library = ctypes.CDLL(str(fake_libraries.build(hip)[0]))
    library.fakeDelay.argtypes = [ctypes.c_void_p, ctypes.c_long]
    return library


def call(name: str, *args: Any) -> None:
    code = getattr(runtime(), f"cuda{name}")(*args)
    assert code == 0, f"cuda{name}: {code}"


def current_device() -> int:
    device = ctypes.c_int()
    call("GetDevice", ctypes.byref(device))
    return device.value


class Pool:
    """Hands memory out again at once, as the pools of torch and CuPy do: in the order of the stream it was taken for.

    What uses it in another stream without waiting finds bytes of the next owner.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, int | None, int], list[int]] = {}
        self._kept: list[Any] = []
        self._scribbles = [(ctypes.c_char * 4096)(*b"\xee" * 4096)]  # copies may still read older ones

    def take(self, nbytes: int, stream: Stream) -> tuple[int, tuple[int, int | None, int]]:
        place = (current_device(), stream.handle, nbytes)
        if self._free.get(place):
            return self._free[place].pop(), place
        memory = ctypes.c_void_p()
        call("Malloc", ctypes.byref(memory), ctypes.c_size_t(nbytes))
        return memory.value or 0, place

    def give(self, address: int, place: tuple[int, int | None, int], kept: list[Any]) -> None:
        """`kept`: what copies that are in progress still read."""
        self._kept += kept
        device, stream, nbytes = place
        if len(self._scribbles[-1]) < nbytes:
            self._scribbles.append((ctypes.c_char * nbytes)(*b"\xee" * nbytes))
        before, library = current_device(), runtime()
        library.cudaSetDevice(device)
        code = library.cudaMemcpyAsync(
            ctypes.c_void_p(address), self._scribbles[-1], ctypes.c_size_t(nbytes), 4, ctypes.c_void_p(stream)
        )
        if code == 0:
            self._free.setdefault(place, []).append(address)
        else:  # the stream has been destroyed, or the device lost
            library.cudaFree(ctypes.c_void_p(address))
        library.cudaGetLastError()
        library.cudaSetDevice(before)

    def empty(self) -> None:
        for address in (address for addresses in self._free.values() for address in addresses):
            runtime().cudaFree(ctypes.c_void_p(address))
        self._free.clear()
        self._kept.clear()  # to free memory waits for the device


POOL = Pool()
# Never freed: streams may still copy from its buffers while the interpreter ends.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(POOL))


def counts() -> list[int]:
    """Blocks of device memory in use, blocks of pinned memory, streams and events that exist."""
    POOL.empty()
    found = (ctypes.c_long * 4)()
    runtime().fakeCounts(found)
    return list(found)


def counts_at_rest() -> list[int]:
    """`counts`, once nothing is left, or after 30 s.

    A thread that has launched operations holds its group until it sees that the group has been closed.
    """
    deadline = time.monotonic() + 30
    while any(found := counts()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def crossed() -> int:
    """Bytes that this process has copied between the host and devices."""
    library = runtime()
    library.fakeCrossed.restype = ctypes.c_long
    return int(library.fakeCrossed())


def longest_copy() -> int:
    """Bytes of the longest copy between the host and devices since this was called last."""
    library = runtime()
    library.fakeLongestCopy.restype = ctypes.c_long
    return int(library.fakeLongestCopy())


def drains() -> int:
    """Calls of this process that are waiting for a stream to end, or for all of a device."""
    library = runtime()
    library.fakeDrains.restype = ctypes.c_long
    return int(library.fakeDrains())


class SlowCalls(NamedTuple):
    """Calls of this process that what is done again and again makes do without."""

    pinned: int
    allocated: int
    synchronized: int


def slow_calls() -> SlowCalls:
    found = (ctypes.c_long * 3)()
    runtime().fakeSlowCalls(found)
    return SlowCalls(*found)


def _of_nccl(name: str, kind: Any = ctypes.c_long) -> Any:
    if real_libraries.wanted():
        real_libraries.skip()
    function = getattr(ctypes.CDLL(str(fake_libraries.build()[1])), name)
    function.restype = kind
    return function()


def nccl_calls() -> int:
    """Collectives and messages of this process that went to NCCL."""
    return int(_of_nccl("fakeNcclCalls"))


def nccl_comms() -> int:
    """Communicators of NCCL that this process has."""
    return int(_of_nccl("fakeNcclComms"))


def nccl_interfaces() -> str:
    """The value of NCCL_SOCKET_IFNAME when NCCL started in this process."""
    return str(_of_nccl("fakeNcclInterfaces", ctypes.c_char_p).decode())


class Stream:
    """`blocking`: it and the legacy default stream wait for each other."""

    def __init__(self, handle: int | None = None, *, blocking: bool = True) -> None:
        self.handle = handle
        if handle is None:
            made = ctypes.c_void_p()
            call("StreamCreateWithFlags", ctypes.byref(made), 0 if blocking else 1)
            self.handle = made.value

    def delay(self, microseconds: int) -> None:
        """What is put into the stream from now on begins so much later."""
        runtime().fakeDelay(self.handle, microseconds)

    def hold(self) -> None:
        """What is put into the stream from now on begins only after `release`. One at a time."""
        runtime().fakeHold(ctypes.c_void_p(self.handle))

    def release(self) -> None:
        runtime().fakeRelease(ctypes.c_void_p(self.handle))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What is put into the stream within it begins only after it. One at a time."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def synchronize(self) -> None:
        call("StreamSynchronize", ctypes.c_void_p(self.handle))


DEFAULT = Stream(0)


def let_wait(later: Stream, earlier: Stream) -> None:
    """What is put into `later` from now on begins only after what is in `earlier`. Of the current device."""
    if (later.handle or 1) == (earlier.handle or 1):  # 0 and 1 are the legacy default stream
        return
    event = ctypes.c_void_p()
    call("EventCreateWithFlags", ctypes.byref(event), 2)
    call("EventRecord", event, ctypes.c_void_p(earlier.handle))
    call("StreamWaitEvent", ctypes.c_void_p(later.handle), event, 0)
    call("EventDestroy", event)


GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # modes of capture


class Graph:
    """What is put into a stream while this is entered, to be launched as often as wanted."""

    def __init__(self, stream: Stream, mode: int = GLOBAL) -> None:
        self.stream, self.mode = stream, mode
        self.handle = ctypes.c_void_p()
        self.length = -1  # how much the capture has recorded, once it has ended

    def __enter__(self) -> Graph:
        call("StreamBeginCapture", ctypes.c_void_p(self.stream.handle), self.mode)
        return self

    def __exit__(self, *error: Any) -> None:
        graph = ctypes.c_void_p()
        code = runtime().cudaStreamEndCapture(ctypes.c_void_p(self.stream.handle), ctypes.byref(graph))
        assert code == 0, f"the capture was ended: {code}"
        length = ctypes.c_size_t()
        call("GraphGetNodes", graph, None, ctypes.byref(length))
        self.length = length.value
        call("GraphInstantiate", ctypes.byref(self.handle), graph, ctypes.c_ulonglong(0))
        call("GraphDestroy", graph)

    def launch(self, stream: Stream) -> None:
        call("GraphLaunch", self.handle, ctypes.c_void_p(stream.handle))


class Array:
    """Device memory that is used in `stream`. Copies to and from the host are put into that stream."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: Stream = DEFAULT) -> None:
        self.shape, self.dtype, self.stream = tuple(shape), np.dtype(dtype), stream
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        # Arrays of torch and CuPy have no address where they have no elements.
        self.address, self._place = (
            POOL.take(self.nbytes, stream) if self.nbytes else (0, (current_device(), None, 0))
        )
        self.readonly = False
        self.axes = tuple(range(len(self.shape)))  # as they lie in memory, the outermost first
        self._owner: Array | None = None  # of the memory of a view
        self._kept: list[Any] = []

    @classmethod
    def of(cls, values: np.ndarray[Any, Any], stream: Stream = DEFAULT) -> Array:
        made = cls(values.shape, values.dtype, stream)
        made.set(values)
        return made

    @classmethod
    def in_order(cls, values: np.ndarray[Any, Any], axes: tuple[int, ...], stream: Stream = DEFAULT) -> Array:
        """With the axes in this order in memory, the outermost first; (0, 2, 3, 1) is torch's channels_last."""
        made = cls(values.shape, values.dtype, stream)
        made.axes = axes
        made.set(values)
        return made

    def part(self, start: int, stop: int) -> Array:
        """A view of some elements of an array of one dimension."""
        view = object.__new__(Array)
        view.shape, view.dtype, view.stream, view.readonly = (stop - start,), self.dtype, self.stream, False
        view.address = self.address + start * self.dtype.itemsize
        view.nbytes = (stop - start) * self.dtype.itemsize
        view._kept, view._owner, view.axes = [], self, (0,)
        return view

    def set(self, values: np.ndarray[Any, Any]) -> None:
        """Begins a copy from the host."""
        values = np.ascontiguousarray(values.transpose(self.axes)).copy()
        self._kept.append(values)
        self._copy(self.address, values.ctypes.data)

    def get(self) -> np.ndarray[Any, Any]:
        """The elements, once what is in the stream now has ended."""
        values = np.empty([self.shape[axis] for axis in self.axes], self.dtype)
        self._copy(values.ctypes.data, self.address)
        self.stream.synchronize()
        self._kept.clear()
        return values.transpose(np.argsort(self.axes))

    @property
    def strides(self) -> tuple[int, ...] | None:
        """In bytes; None for row-major order."""
        if self.axes == tuple(range(len(self.shape))):
            return None
        steps = np.empty([self.shape[axis] for axis in self.axes], self.dtype).strides
        return tuple(steps[self.axes.index(axis)] for axis in range(len(self.shape)))

    def _copy(self, to: int, source: int) -> None:
        if self.nbytes == 0:
            return
        args = (ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(self.nbytes), 4)
        call("MemcpyAsync", *args, ctypes.c_void_p(self.stream.handle))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, self.readonly),
            "version": 3,
            "strides": self.strides,
            "stream": self.stream.handle or 1,
        }

    def __del__(self) -> None:
        if getattr(self, "address", 0) and self._owner is None and runtime is not None:
            POOL.give(self.address, self._place, self._kept)


class ConvertingArray(Array):
    """Of a library whose kernels convert between float16 and float32, as CuPy's do."""

    def transpose(self, axes: tuple[int, ...]) -> ConvertingArray:
        """A view of a row-major array."""
        view = object.__new__(ConvertingArray)
        view.__dict__.update(self.__dict__)
        view.shape, view.axes = tuple(self.shape[axis] for axis in axes), tuple(np.argsort(axes).tolist())
        view._kept, view._owner = [], self
        return view

    def astype(self, dtype: Any) -> ConvertingArray:
        made = type(self)(self.shape, np.dtype(dtype), self.stream)
        made._convert(self)
        return made

    def reshape(self, *shape: int) -> ConvertingArray:
        """A view, as of a contiguous array."""
        view = copy.copy(self)
        view.shape = np.empty(self.shape, "V0").reshape(shape).shape
        view._kept, view._owner, view.axes = [], self, tuple(range(len(view.shape)))
        return view

    def __setitem__(self, key: Any, values: ConvertingArray) -> None:
        assert key is Ellipsis
        self._convert(values)

    def _convert(self, source: ConvertingArray) -> None:
        widens = source.dtype == np.float16 and self.dtype == np.float32
        assert widens or (source.dtype == np.float32 and self.dtype == np.float16)
        count = int(np.prod(self.shape, dtype=np.int64))
        args = (ctypes.c_void_p(self.address), ctypes.c_void_p(source.address), ctypes.c_size_t(count))
        code = runtime().fakeConvert(*args, int(widens), ctypes.c_void_p(self.stream.handle))
        assert code == 0, f"fakeConvert: {code}"


ConvertingArray.__module__ = "cupy.stand_in"


def cupy() -> types.ModuleType:
    """What is needed of the library whose arrays these are, for `sys.modules["cupy"]`."""
    made: Any = types.ModuleType("cupy")
    made.empty = lambda shape, dtype: ConvertingArray(shape, dtype, Stream())
    made.cuda = types.SimpleNamespace(Device=_Device)
    return made


class _Device:
    def __init__(self, device: int | None) -> None:
        self._device = current_device() if device is None else device
        self._before: list[int] = []

    def use(self) -> None:
        call("SetDevice", self._device)

    def __enter__(self) -> None:
        self._before.append(current_device())
        self.use()

    def __exit__(self, *error: Any) -> None:
        call("SetDevice", self._before.pop())


class DLPackArray(Array):
    """The same for types that the other protocol has no name for."""

    __cuda_array_interface__ = property()  # type: ignore[assignment]  # raises AttributeError

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._place[0]

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None) -> Any:
        """The consumer's stream waits for the array: without one the legacy default stream, for -1 none."""
        assert stream != 0, "which DLPack does not allow, since it may mean several streams"
        device = self._place[0]
        if stream != -1:
            before = current_device()
            call("SetDevice", device)
            let_wait(Stream(1 if stream is None else stream), self.stream)
            call("SetDevice", before)
        versioned = max_version is not None
        return _core.to_dlpack(self, self.address, self.dtype.name, self.shape, "cuda", device, versioned)


def array_of(values: np.ndarray[Any, Any], stream: Stream = DEFAULT) -> Array:
    """Values in device memory."""
    return (Array if in_interface(values.dtype) else DLPackArray).of(values, stream)


def in_interface(dtype: np.dtype[Any]) -> bool:
    """Whether `__cuda_array_interface__` has a name for it."""
    return dtype.isbuiltin == 1 and dtype.kind in "biufc"

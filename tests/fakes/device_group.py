"""A backend for tests that know NumPy only: each NumPy array they pass is one in device memory to the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_arrays
import numpy as np
from samestep.errors import Error
from samestep.gpu.device_array import DeviceArray
from samestep.group.work import Work

# Verbs that are not given arrays to move, or whose arrays are of the host by contract.
HOST_VERBS = ("empty", "zeros", "empty_like", "barrier", "ibarrier", "println", "close")


class DeviceGroup:
    """As the backend, but every NumPy argument is copied to device memory before a call, and back after it."""

    def __init__(self, backend: Any, stream: fake_arrays.Stream) -> None:
        self._backend = backend
        self._stream = stream
        self._groups: dict[Any, DeviceGroup] = {backend: self}

    @property
    def __class__(self) -> Any:  # for isinstance
        return type(self._backend)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        if name in ("node", "cross"):
            if value not in self._groups:
                self._groups[value] = DeviceGroup(value, self._stream)
            return self._groups[value]
        if name in ("split", "group"):
            return lambda *args, **kwargs: self._wrapped(value(*args, **kwargs))
        host = name.startswith("_") or name.endswith("_object") or name in HOST_VERBS
        return self._on_device(value) if callable(value) and not host else value

    def _wrapped(self, group: Any) -> Any:
        return None if group is None else DeviceGroup(group, self._stream)

    def _on_device(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            moved = Moved(self._stream)
            given = list(map(moved.there, args)), {k: moved.there(v) for k, v in kwargs.items()}
            try:
                result = verb(*given[0], **given[1])
            except Error:
                moved.write_back()
                raise
            return Pending(result, moved) if isinstance(result, Work) else moved.back(result)

        return call

    def __enter__(self) -> DeviceGroup:
        return self

    def __exit__(self, *error: Any) -> None:
        self._backend.__exit__(*error)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._backend.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self._backend)


class Moved:
    """The arrays of one call."""

    def __init__(self, stream: fake_arrays.Stream) -> None:
        self._stream = stream
        self._pairs: list[tuple[np.ndarray[Any, Any], fake_arrays.Array]] = []

    def there(self, value: Any) -> Any:
        if type(value) is dict:
            return {key: self.there(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return _container(value, map(self.there, value))
        if not _can_be_there(value):
            return value
        for mine, theirs in self._pairs:
            if mine is value:
                return theirs
        stream = self._stream if fake_arrays.in_interface(value.dtype) else fake_arrays.DEFAULT
        theirs = fake_arrays.array_of(value, stream)
        theirs.readonly = not value.flags.writeable
        self._pairs.append((value, theirs))
        return theirs

    def back(self, result: Any) -> Any:
        self.write_back()
        return self._here(result)

    def write_back(self) -> None:
        for mine, theirs in self._pairs:
            if mine.flags.writeable:
                mine[...] = theirs.get()

    def _here(self, result: Any) -> Any:
        if type(result) is dict:
            return {key: self._here(part) for key, part in result.items()}
        if isinstance(result, list | tuple):
            return _container(result, map(self._here, result))
        if isinstance(result, DeviceArray):
            return result.numpy()
        for mine, theirs in self._pairs:
            if theirs is result:
                return mine
        return result.get() if isinstance(result, fake_arrays.Array) else result


def through_group(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the package that takes a backend first, so that it moves arrays for a DeviceGroup."""

    def call(backend: Any, *args: Any, **kwargs: Any) -> Any:
        if type(backend) is DeviceGroup:
            method = getattr(backend, function.__name__, None)
            return method(*args, **kwargs) if method else function(backend._backend, *args, **kwargs)
        return function(backend, *args, **kwargs)

    return call


def _can_be_there(value: Any) -> bool:
    if type(value) is not np.ndarray and not isinstance(value, np.memmap):
        return False
    if value.dtype.kind in "OSUMm" or not value.dtype.isnative:
        return False
    if 0 in value.strides and value.size > 1 and value.flags.writeable:
        return False  # elements in one place: refused as they are
    # DLPack, which alone has some types, cannot say that an array is not to be written.
    return bool(value.flags.writeable) or fake_arrays.in_interface(value.dtype)


def _container(like: Any, parts: Any) -> Any:
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


class Pending:
    """A Work whose result is brought back when it is waited for."""

    def __init__(self, work: Work, moved: Moved) -> None:
        self._work = work
        self._moved = moved

    @property
    def __class__(self) -> Any:
        return Work

    def wait(self, timeout: float | None = None) -> Any:
        return self._moved.back(self._work.wait(timeout))

    def _wait_blocking(self, timeout: float | None = None) -> Any:  # what trees and Accumulator call
        return self._moved.back(self._work._wait_blocking(timeout))

    def __await__(self) -> Any:
        result = yield from self._work.__await__()
        return self._moved.back(result)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

"""A backend for tests that know NumPy only: each NumPy array they pass is one in device memory to the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_arrays
import numpy as np
from samestep.device_arrays import DeviceArray
from samestep.work import Work


class DeviceGroup:
    """As the backend, but every NumPy argument goes to device memory before a call, and comes back after it."""

    def __init__(self, backend: Any, stream: fake_arrays.Stream) -> None:
        self._backend = backend
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        if name in ("node", "cross"):
            return DeviceGroup(value, self._stream)
        if name in ("split", "group"):
            return lambda *args, **kwargs: self._wrapped(value(*args, **kwargs))
        return self._on_device(value) if callable(value) and not name.endswith("_object") else value

    def _wrapped(self, group: Any) -> Any:
        return None if group is None else DeviceGroup(group, self._stream)

    def _on_device(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            moved = Moved(self._stream)
            result = verb(*map(moved.there, args), **{k: moved.there(v) for k, v in kwargs.items()})
            return Pending(result, moved) if isinstance(result, Work) else moved.back(result)

        return call

    def __enter__(self) -> DeviceGroup:
        return self

    def __exit__(self, *error: Any) -> None:
        self._backend.__exit__(*error)


class Moved:
    """The arrays of one call."""

    def __init__(self, stream: fake_arrays.Stream) -> None:
        self._stream = stream
        self._pairs: list[tuple[np.ndarray[Any, Any], fake_arrays.Array]] = []

    def there(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.kind in "OSUMm":
            return value
        for mine, theirs in self._pairs:
            if mine is value:
                return theirs
        stream = self._stream if value.dtype.name in fake_arrays._TYPES else fake_arrays.DEFAULT
        theirs = fake_arrays.array_of(value, stream)
        theirs.readonly = not value.flags.writeable
        self._pairs.append((value, theirs))
        return theirs

    def back(self, result: Any) -> Any:
        for mine, theirs in self._pairs:
            if mine.flags.writeable:
                mine[...] = theirs.get()
        return self._here(result)

    def _here(self, result: Any) -> Any:
        if type(result) is tuple:
            return tuple(map(self._here, result))
        if isinstance(result, DeviceArray):
            return result.numpy()
        for mine, theirs in self._pairs:
            if theirs is result:
                return mine
        return result.get() if isinstance(result, fake_arrays.Array) else result


class Pending:
    """A Work whose result is brought back when it is waited for."""

    def __init__(self, work: Work, moved: Moved) -> None:
        self._work = work
        self._moved = moved

    def wait(self, timeout: float | None = None) -> Any:
        return self._moved.back(self._work.wait(timeout))

    def __await__(self) -> Any:
        result = yield from self._work.__await__()
        return self._moved.back(result)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

"""One array in many memory layouts, each in a block whose other bytes must stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Laid(NamedTuple):
    """An array with a layout. `untouched` raises if a byte around its elements has changed."""

    array: np.ndarray[Any, Any]
    untouched: Callable[[], None]


def _in_block(values: np.ndarray[Any, Any], shape: tuple[int, ...], cut: Callable[[Any], Any]) -> Laid:
    block = np.empty(shape, values.dtype)
    block.view(np.uint8)[...] = 0xA5
    array = cut(block)
    assert array.shape == values.shape, (array.shape, values.shape)
    mask = np.ones(shape, bool)
    cut(mask)[...] = False
    outside = block.copy()
    array[...] = values

    def untouched() -> None:
        assert (block[mask].tobytes()) == outside[mask].tobytes(), "bytes between the elements were written"

    return Laid(array, untouched)


def contiguous(values: np.ndarray[Any, Any], folder: Path) -> Laid:
    n = values.size
    return _in_block(values, (n + 6,), lambda b: b[3 : 3 + n].reshape(values.shape))


def strided(values: np.ndarray[Any, Any], folder: Path) -> Laid:
    rows, columns = values.shape
    return _in_block(
        values, (2 * rows + 1, 3 * columns + 2), lambda b: b[1 : 2 * rows + 1 : 2, 1 : 3 * columns + 1 : 3]
    )


def column(values: np.ndarray[Any, Any], folder: Path) -> Laid:
    rows, columns = values.shape
    return _in_block(values, (rows, columns, 3), lambda b: b[:, :, 1])


def negative(values: np.ndarray[Any, Any], folder: Path) -> Laid:
    rows, columns = values.shape
    return _in_block(values, (rows + 2, columns + 1), lambda b: b[rows:0:-1, -2::-1])


def fortran(values: np.ndarray[Any, Any], folder: Path) -> Laid:
    return _in_block(values, values.shape[::-1], lambda b: b.T)


def unaligned(values: np.ndarray[Any, Any], folder: Path) -> Laid:
    raw = bytearray(b"\xa5" * (values.nbytes + 2))
    array = np.frombuffer(raw, np.uint8)[1 : 1 + values.nbytes].view(values.dtype).reshape(values.shape)
    array[...] = values

    def untouched() -> None:
        assert raw[0] == raw[-1] == 0xA5, "bytes around the array were written"

    return Laid(array, untouched)


def memmap(values: np.ndarray[Any, Any], folder: Path) -> Laid:
    path = folder / f"{len(list(folder.iterdir()))}.bin"
    path.write_bytes(b"\xa5" * 16 + values.tobytes() + b"\xa5" * 16)
    array = np.memmap(path, values.dtype, "r+", 16, values.shape)

    def untouched() -> None:
        array.flush()
        stored = path.read_bytes()
        assert stored[:16] == stored[-16:] == b"\xa5" * 16

    return Laid(array, untouched)


WRITABLE = [contiguous, strided, column, negative, fortran, unaligned, memmap]


def read_only(values: np.ndarray[Any, Any], folder: Path) -> Laid:
    array = values.copy()
    array.flags.writeable = False
    return Laid(array, lambda: None)


def read_only_memmap(values: np.ndarray[Any, Any], folder: Path) -> Laid:
    path = memmap(values, folder).array.filename
    return Laid(np.memmap(path, values.dtype, "r", 16, values.shape), lambda: None)


def broadcast(values: np.ndarray[Any, Any], folder: Path) -> Laid:
    """Stride 0: all rows are the first one's memory. Only its first row takes part in comparisons."""
    return Laid(np.broadcast_to(values[:1].copy(), values.shape), lambda: None)


READ_ONLY = [read_only, read_only_memmap, broadcast]

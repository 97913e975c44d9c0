"""The rows of a data set: how many it has, and some of them by position."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from samestep.errors import InvalidArgumentError
from samestep.group.backend_argument import not_a_backend

_Positions = range | np.ndarray[Any, np.dtype[np.int64]]


def require_backend_and_data(call: str, backend: Any, data: Any) -> None:
    """Raise TypeError if the arguments of a constructor lack the backend or the data, or have them in another place."""
    given = (getattr(backend, "rank", None), getattr(backend, "size", None))
    if not all(isinstance(number, int) for number in given):
        raise not_a_backend(f"{call}(backend, data)", *(x for x in (backend, data) if x is not None))
    if data is None:
        raise TypeError(f"{call}: data is None; every rank passes all of the data, and takes its part")
    of = getattr(data, "divided_by", None)  # of a table it may be a column
    if isinstance(of, tuple) and of == divided_by(backend):
        raise InvalidArgumentError(
            f"{call}: data is this rank's part of a DistributedDataContainer, of which it would take a part once more; "
            "pass the whole data, or give the part to a loader without a sampler of samestep"
        )


def divided_by(backend: Any) -> tuple[str, int]:
    """What tells the group that divides data from others; can be sent to the process of a loader, as no group can."""
    return getattr(backend, "name", ""), backend.size


def count(data: Any, call: str) -> int:
    """The number of rows of `data`; reads none of them.

    Raises:
      InvalidArgumentError: the columns differ in length, or `data` does not give rows by position.
    """
    shapes = [getattr(item, "shape", None) for item in data[:5]] if isinstance(data, list) else []
    lengths = {shape[0] for shape in shapes if isinstance(shape, tuple) and shape}
    if 1 < len(shapes) < 5 and len(lengths) == 1 and None not in shapes and lengths.pop() >= 16:
        warnings.warn(
            f"{call}: a list is a sequence of items, so these {len(data)} arrays of equal length are {len(data)} "
            "items; for columns pass a tuple or a dict of the arrays",
            stacklevel=3,
        )
    return _count(data, call, "data")


def _count(data: Any, call: str, what: str) -> int:
    if isinstance(data, (dict, tuple)):
        columns = data.items() if isinstance(data, dict) else enumerate(data)
        lengths = {name: _count(column, call, f"{what}[{name!r}]") for name, column in columns}
        if len(set(lengths.values())) > 1:
            raise InvalidArgumentError(f"{call}: the columns of {what} differ in length: {lengths}")
        return next(iter(lengths.values()), 0)
    kind = type(data)
    if isinstance(data, Mapping):
        _refuse(call, what, data, "is a mapping; pass dict(data), a dict of columns")
    if isinstance(data, (str, bytes)):
        _refuse(
            call, what, data, "is not a sequence of items; pass list(data) if its characters are the items"
        )
    if _is_table(kind):
        cures = "table.to_pydict() of pyarrow or df.to_dict(as_series=False) of polars"
        _refuse(call, what, data, f"gives columns; pass a dict of them, e.g. {cures}")
    if callable(getattr(kind, "__getitem__", None)) and (length := _length(data)) is not None:
        return length
    if dataclasses.is_dataclass(data):
        _refuse(call, what, data, "is a dataclass; pass vars(data), a dict of columns")
    return _refuse(
        call,
        what,
        data,
        "has no length or no items; pass an array, a list of items, or a dict or tuple of columns, and split "
        "a stream at its source, e.g. by datasets.distributed.split_dataset_by_node(data, rank, size)",
    )


def _refuse(call: str, what: str, data: Any, why: str) -> NoReturn:
    raise InvalidArgumentError(f"{call}: {what} of type {type(data).__name__} {why}")


def _is_table(kind: type) -> bool:
    """Whether `[i]` may be a column, and no `iloc` gives rows: tables of pyarrow, polars."""
    exchanges = hasattr(kind, "__dataframe__") or hasattr(kind, "__arrow_c_stream__")
    return exchanges and hasattr(kind, "columns") and not hasattr(kind, "iloc")


def _length(column: Any) -> int | None:
    try:
        return len(column)
    except TypeError:  # a sparse matrix, which takes len for ambiguous, or an array without dimensions
        shape = getattr(column, "shape", None)
        return int(shape[0]) if isinstance(shape, tuple) and shape else None


def take(data: Any, where: int | _Positions) -> Any:
    """The row at a position, or those at several, of `data` that `count` accepts.

    Slices and arrays of positions reach only what has a shape. Any other sequence is asked for single items, because
    an object that accepts a list or a slice need not mean several items by it.
    """
    if isinstance(data, dict):
        return {name: take(column, where) for name, column in data.items()}
    if isinstance(data, tuple):
        columns = [take(column, where) for column in data]
        return type(data)._make(columns) if hasattr(data, "_make") else tuple(columns)
    rows = getattr(data, "iloc", data)  # pandas and its kin: [] would look up labels
    if isinstance(where, int):
        return rows[where]
    shape = getattr(data, "shape", None)
    if isinstance(shape, tuple) and shape[:1] == (_length(data),):
        return rows[_as_slice(where) if isinstance(where, range) else where]
    return [rows[int(i)] for i in where]


def _as_slice(positions: range) -> slice:
    if not positions:
        return slice(0, 0)
    # A descending run that ends at item 0 of the data has no stop that could be written as a number.
    return slice(positions.start, positions.stop if positions.stop >= 0 else None, positions.step)

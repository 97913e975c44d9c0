"""The rows of a data set: how many it has, some of them by position, and those of one rank."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from samestep.errors import InvalidArgumentError
from samestep.group.backend_argument import not_a_backend
from samestep.group.group import Group
from samestep.step.shards import part_of

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


class DistributedDataContainer:
    """This rank's part of `data`: has a length, items and slices, can be iterated, and is a torch `Dataset`.

    A dict, tuple or named tuple holds columns of equal length, which may be dicts and tuples of columns in turn; an
    item is then the same container of one item of each. `x, y = part[:]` takes the columns of a tuple apart; without
    `[:]` it would be the part's items that are unpacked. Any other object with `len` and item access is a sequence of
    items: list, array, memmap, tensor, torch `Dataset`, Hugging Face `Dataset`; of pandas objects the rows, by
    position. Tables and mappings of other kinds are refused. Items are read on access. Slices of arrays are views.

    Parts are contiguous, in order of rank, together hold every item exactly once, and differ in length by
    at most one: ranks may see different numbers of batches. If all must take the same number of steps,
    use `DistributedSampler` with mode "pad" or "drop", or drop the last batch. No communication.

    Args:
      backend: the group that shares the data.
      data: the whole data, the same on all ranks. Required.

    Raises:
      TypeError: the backend or the data are missing.
      InvalidArgumentError: `data` has no length or no rows by position, or its columns differ in length.

    Example:
      >>> import numpy as np, samestep as ss
      >>> columns = {"x": np.arange(6).reshape(3, 2), "y": [7, 8, 9]}
      >>> data = ss.DistributedDataContainer(ss.initialize(), columns)
      >>> len(data), data[2], data[:2]["y"]
      (3, {'x': array([4, 5]), 'y': 9}, [7, 8])
    """

    def __init__(self, backend: Group, data: Any = None) -> None:
        require_backend_and_data("DistributedDataContainer", backend, data)
        self.data = data
        self.divided_by = divided_by(backend)
        """For those that would divide this part again."""
        self.indices = part_of(count(data, "DistributedDataContainer"), backend.rank, backend.size)
        """Where this part lies in `data`."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        """One item, or several: what NumPy gives for the same index into an array of this part's items.

        Args:
          index: an int, a slice, a list, range or array of ints, or a boolean mask of this part's length.

        Raises:
          TypeError: any other index.
          IndexError: out of range, or a mask of another length.
        """
        if isinstance(index, slice):
            return take(self.data, self.indices[index])
        if not hasattr(index, "shape") and hasattr(index, "__index__") and not isinstance(index, bool):
            return take(self.data, self._position(operator.index(index)))
        positions = self._positions(index)
        return take(self.data, positions if positions.ndim else int(positions))

    def __iter__(self) -> Iterator[Any]:
        return (take(self.data, position) for position in self.indices)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """The items at several indices; torch's DataLoader calls it if it exists."""
        positions = self._positions(list(indices)).tolist()
        many = getattr(self.data, "__getitems__", None)
        return many(positions) if many is not None else [take(self.data, i) for i in positions]

    def __repr__(self) -> str:
        return f"DistributedDataContainer({self.indices} of {type(self.data).__name__})"

    def _position(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(
                f"DistributedDataContainer: index {index} is out of range for this rank's part of {len(self)} items"
            )
        return self.indices[index]

    def _positions(self, index: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where in the data the items of an array of indices lie; without dimensions for one without."""
        given = np.asarray(index) if not isinstance(index, list) or index else np.empty(0, np.int64)
        if given.dtype == bool and given.ndim == 1:
            if len(given) != len(self):
                raise IndexError(
                    f"DistributedDataContainer: a mask of {len(given)} for this rank's part of {len(self)} items"
                )
            given = np.flatnonzero(given)
        if given.dtype.kind not in "iu" or given.ndim > 1 or isinstance(index, tuple):
            raise TypeError(
                "DistributedDataContainer: an index is an int, a slice, a list or array of ints, or a boolean mask "
                f"of this part's length, got {type(index).__name__} of {given.dtype} with {given.ndim} dimensions"
            )
        for outside in given[(given < -len(self)) | (given >= len(self))]:
            self._position(int(outside))
        positions = given.astype(np.int64)
        return positions + np.where(positions < 0, self.indices.stop, self.indices.start)

"""One rank's contiguous part of a data set, without copying it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep.errors import InvalidArgumentError

if TYPE_CHECKING:
    from samestep.group.group import Group


def part_of(length: int, rank: int, size: int) -> range:
    """The contiguous run of `range(length)` that belongs to `rank` of `size`.

    Runs follow each other in order of rank and differ in length by at most one, the longer ones first.

    Example:
      >>> [part_of(10, rank, 4) for rank in range(4)]
      [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    """
    shortest, n_longer = divmod(length, size)
    start = rank * shortest + min(rank, n_longer)
    return range(start, start + shortest + (rank < n_longer))


class DistributedDataContainer:
    """This rank's part of `data`: has a length, items and slices, can be iterated, and is a torch `Dataset`.

    A dict, tuple or named tuple holds columns of equal length; an item is then the same container of one
    item of each. Any other object with `len` and item access is a sequence of items: list, array, memmap, tensor,
    torch `Dataset`, Hugging Face `Dataset`. Items are read on access. Slices are
    passed on as slices, so that slices of arrays are views.

    Parts are contiguous, in order of rank, together hold every item exactly once, and differ in length by
    at most one: ranks may see different numbers of batches. If all must take the same number of steps,
    use `DistributedSampler` with mode "pad" or "drop", or drop the last batch. No communication.

    Args:
      backend: the group that shares the data.
      data: the whole data, the same on all ranks.

    Raises:
      InvalidArgumentError: `data` has no length, or its columns differ in length.

    Example:
      >>> import numpy as np, samestep as ss
      >>> columns = {"x": np.arange(6).reshape(3, 2), "y": [7, 8, 9]}
      >>> data = ss.DistributedDataContainer(ss.initialize(), columns)
      >>> len(data), data[2], data[:2]["y"]
      (3, {'x': array([4, 5]), 'y': 9}, [7, 8])
    """

    def __init__(self, backend: Group, data: Any) -> None:
        self.data = data
        self.indices = part_of(_length(data), backend.rank, backend.size)
        """Where this part lies in `data`."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        """One item, or several: a slice, or a list or array of indices if `data` accepts one."""
        if isinstance(index, slice):
            return self._take(_as_slice(self.indices[index]))
        if isinstance(index, (list, tuple, np.ndarray)):
            return self._take([self.indices[i] for i in np.asarray(index, np.int64)])
        return self._take(self.indices[operator.index(index)])

    def __iter__(self) -> Iterator[Any]:
        return map(self._take, self.indices)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """The items at several indices; torch's DataLoader calls it if it exists."""
        positions = [self.indices[i] for i in indices]
        many = getattr(self.data, "__getitems__", None)
        return many(positions) if many is not None else [self._take(position) for position in positions]

    def __repr__(self) -> str:
        return f"DistributedDataContainer({self.indices} of {type(self.data).__name__})"

    def _take(self, where: Any) -> Any:
        return _per_column(self.data, lambda column: column[where])


def _as_slice(positions: range) -> slice:
    if not positions:
        return slice(0, 0)
    # A descending run that ends at item 0 of the data has no stop that could be written as a number.
    return slice(positions.start, positions.stop if positions.stop >= 0 else None, positions.step)


def _per_column(data: Any, take: Callable[[Any], Any]) -> Any:
    if isinstance(data, dict):
        return {name: take(column) for name, column in data.items()}
    if isinstance(data, tuple):
        columns = [take(column) for column in data]
        return type(data)._make(columns) if hasattr(data, "_make") else tuple(columns)
    return take(data)


def _length(data: Any) -> int:
    if not isinstance(data, (dict, tuple)):
        return _length_of_column(data, "data")
    names = list(data) if isinstance(data, dict) else range(len(data))
    columns = data.values() if isinstance(data, dict) else data
    lengths = {
        name: _length_of_column(column, f"column {name!r}")
        for name, column in zip(names, columns, strict=True)
    }
    if len(set(lengths.values())) > 1:
        raise InvalidArgumentError(f"DistributedDataContainer: the columns differ in length: {lengths}")
    return next(iter(lengths.values()), 0)


def _length_of_column(column: Any, what: str) -> int:
    try:
        if callable(getattr(type(column), "__getitem__", None)):
            return len(column)
    except TypeError:  # e.g. an array without dimensions
        pass
    raise InvalidArgumentError(
        f"DistributedDataContainer: {what} of type {type(column).__name__} has no length or no items; "
        "split a stream at its source, e.g. by datasets.distributed.split_dataset_by_node(data, rank, size)"
    )

"""One rank's contiguous part of a data set, without copying it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from samestep.data import rows
from samestep.group.group import Group
from samestep.step.shards import part_of


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
        rows.require_backend_and_data("DistributedDataContainer", backend, data)
        self.data = data
        self.divided_by = rows.divided_by(backend)
        """For those that would divide this part again."""
        self.indices = part_of(rows.count(data, "DistributedDataContainer"), backend.rank, backend.size)
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
            return rows.take(self.data, self.indices[index])
        if not hasattr(index, "shape") and hasattr(index, "__index__") and not isinstance(index, bool):
            return rows.take(self.data, self._position(operator.index(index)))
        positions = self._positions(index)
        return rows.take(self.data, positions if positions.ndim else int(positions))

    def __iter__(self) -> Iterator[Any]:
        return (rows.take(self.data, position) for position in self.indices)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """The items at several indices; torch's DataLoader calls it if it exists."""
        positions = self._positions(list(indices)).tolist()
        many = getattr(self.data, "__getitems__", None)
        return many(positions) if many is not None else [rows.take(self.data, i) for i in positions]

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

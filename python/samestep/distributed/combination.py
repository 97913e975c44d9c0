"""Lists of arrays in host memory: a rank first combines its own, in the order of the list, then ranks communicate."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from samestep import _core, internal
from samestep._util.dtypes import numpy_dtype
from samestep.arrays import ArrayInfo
from samestep.group.group import Group
from samestep.reduce_ops import (
    AVG,
    BAND,
    BOR,
    BXOR,
    LAND,
    LOR,
    MAX,
    MIN,
    PREMUL,
    PROD,
    SUM,
)

_Run = np.ndarray[Any, Any]

_LITTLE_NBYTES = 128 << 10  # for which memory that a host's ranks share does not pay

_HALVES = ("float16", "bfloat16")
_UFUNCS: dict[int, np.ufunc] = {
    PROD.value: np.multiply,
    MIN.value: np.minimum,
    MAX.value: np.maximum,
    BAND.value: np.bitwise_and,
    BOR.value: np.bitwise_or,
    BXOR.value: np.bitwise_xor,
    LAND.value: np.logical_and,
    LOR.value: np.logical_or,
}


class ArrayList(NamedTuple):
    """A rank's list of arrays, all of one dtype and count."""

    act: str
    """The function that the user called, for messages."""
    arrays: Any
    """The user's list or tuple."""
    infos: list[ArrayInfo]

    @property
    def n_elements(self) -> int:
        """Elements of each."""
        return math.prod(self.infos[0].shape)

    @property
    def dtype(self) -> str:
        """Of all."""
        return self.infos[0].dtype


def shared_memory(group: Group, shape: tuple[int, ...], dtype: Any = np.uint8) -> _Run:
    """An array that the ranks of a host share, if they can and it pays."""
    kind = np.dtype(dtype)
    return (group.empty if math.prod(shape) * kind.itemsize > _LITTLE_NBYTES else np.empty)(shape, kind)


def started(
    group: Group,
    listed: ArrayList,
    verb: str,
    run: Any,
    out: Any,
    *,
    code: int = SUM.value,
    root: int = -1,
    root_array: int = 0,
) -> _core.Work:
    """A collective of the ranks' runs, whose headers show the call on the lists: ranks compare that.

    Args:
      listed: the list that `run` was made of.
      verb: "allreduce", "reduce", "bcast" or "allgather".
      out: what receives the result; `run` itself for all but allgather.
      code: the operator of the call; the runs may be combined by another one.
      root: the rank that gets or sends, -1 for a verb without one.
      root_array: which of its arrays.
    """
    # The runs are summed for AVG and PREMUL: `Combination` applies divisors and factors.
    op = SUM.value if code in (AVG.value, PREMUL) else code
    return _core.start_list_on_host(
        internal.communicator(group),
        verb,
        run,
        out,
        op,
        root,
        listed.dtype,
        code,
        len(listed.arrays),
        listed.n_elements,
        root_array,
    )


@functools.cache
def _alone() -> _core.Communicator:
    return _core.make_self_communicator("check")


class Combination:
    """Combines the arrays of a rank into one run of elements, and makes the result of the runs of all ranks."""

    def __init__(self, listed: ArrayList, code: int, factor: float, n_ranks: int) -> None:
        """Raises InvalidArgumentError, in the words of allreduce, if the dtype does not have the operator."""
        self._listed, self._code, self._factor = listed, code, factor
        self._n = n_ranks * len(listed.arrays)
        self._dtype: np.dtype[Any] = numpy_dtype(listed.dtype)
        _alone().allreduce(np.empty(0, self._dtype), None, code, factor)
        kind = self._dtype.kind
        # Quotients and remainders, of which no sum overflows.
        self._is_exact = code == AVG.value and kind in "iu"
        self._wide = self._dtype  # enough for the sum over all ranks
        if self._is_exact:
            self._wide = np.dtype(np.uint64 if kind == "u" else np.int64)
        elif listed.dtype in _HALVES and code not in (MIN.value, MAX.value):
            self._wide = np.dtype(np.float32)

    def combined(self, group: Group) -> _Run:
        """A row of this rank's elements, factors applied; two rows, of which ranks sum each, for exact averages.

        It lies in memory that the ranks of a host share, if there is some.
        """
        listed, combine = self._listed, _UFUNCS.get(self._code, np.add)
        rows = shared_memory(group, (1 + self._is_exact, listed.n_elements), self._wide)
        is_row = self._wide == self._dtype and not self._is_exact
        term = np.empty(listed.n_elements, self._dtype)
        with np.errstate(all="ignore"):
            for i, x in enumerate(listed.arrays):
                elements = rows[0] if i == 0 and is_row else term
                _core.pack([x], elements)
                for row, part in zip(rows, self._parts(elements), strict=True):
                    if i > 0:
                        combine(row, part, out=row)
                    elif not is_row:
                        row[...] = part
        return rows

    def _parts(self, elements: _Run) -> tuple[_Run, ...]:
        """What is added to each row, or combined with it, for the elements of an array, which it may overwrite."""
        if self._is_exact:
            return np.divmod(elements.astype(self._wide, copy=False), self._wide.type(self._n))
        wide = elements.astype(self._wide, copy=False)
        if self._code == PREMUL:
            _scale(wide, self._factor)
        return (wide,)

    def result(self, rows: _Run) -> _Run:
        """The elements of the result, from the rows of `combined` that ranks have reduced."""
        with np.errstate(all="ignore"):
            if self._is_exact:
                exact: _Run = (rows[0] + rows[1] // self._wide.type(self._n)).astype(self._dtype)
                return exact
            if self._code == AVG.value:
                _scale(rows[0], 1 / self._n)
            result: _Run = rows[0].astype(self._dtype, copy=False)
            return result


def _scale(run: _Run, factor: float) -> None:
    """Multiplies in place; of complex numbers both parts, since a factor's imaginary 0 would make NaN of infinity."""
    parts = run.view(run.real.dtype)
    if parts.dtype.kind in "iu":
        parts *= np.array(int(factor), np.int64).astype(parts.dtype)  # wraps, as the sum does
    else:
        parts *= parts.dtype.type(factor)

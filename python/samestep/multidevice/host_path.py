"""Lists of arrays in host memory: a rank first combines its own, in the order of the list, then ranks communicate."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from samestep import _core, arrays
from samestep.arrays import ArrayInfo
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

if TYPE_CHECKING:
    from samestep.group.group import Group

_Run = np.ndarray[Any, Any]

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
    arrays: list[Any]
    infos: list[ArrayInfo]

    @property
    def n_elements(self) -> int:
        """Elements of each."""
        return math.prod(self.infos[0].shape)

    @property
    def dtype(self) -> str:
        """Of all."""
        return self.infos[0].dtype


def host_buffer(listed: ArrayList, n: int) -> Any:
    """Allocate host memory for `n` arrays like those of the list."""
    shape = (n * listed.n_elements,)
    if listed.infos[0].device == "cpu":
        return arrays.new_like(listed.arrays[0], shape)
    return arrays.new_array("numpy", listed.dtype, shape)


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
      group: the ranks.
      listed: the list that `run` was made of.
      verb: "allreduce", "reduce", "bcast" or "allgather".
      run: this rank's elements.
      out: what receives the result; `run` itself for all but allgather.
      code: the operator of the call; the runs may be combined by another one.
      root: the rank that gets or sends, -1 for a verb without one.
      root_array: which of its arrays.
    """
    length, op = len(listed.arrays), _op_of_runs(code)
    return _core.start_list_on_host(
        group._comm, verb, run, out, op, root, listed.dtype, code, length, listed.n_elements, root_array
    )


def _op_of_runs(code: int) -> int:
    """The runs are summed for AVG and PREMUL: `combined` applies divisors and factors."""
    return SUM.value if code in (AVG.value, PREMUL) else code


@functools.cache
def _alone() -> _core.Communicator:
    return _core.make_self_communicator("check")


def combined(
    listed: ArrayList, code: int, factor: float, n_ranks: int
) -> tuple[_Run, Callable[[_Run], _Run]]:
    """This rank's arrays reduced to one run.

    Returns:
      The run, with its factor applied and in a type wide enough for the sum over all ranks; and the function that makes
      the result of what the runs are reduced to.
    """
    n_here = len(listed.arrays)
    stacked: _Run = arrays.new_array("numpy", listed.dtype, (n_here, listed.n_elements))
    # An operator that the dtype does not have is refused in the same words as by allreduce.
    _alone().allreduce(np.empty(0, stacked.dtype), None, code, factor)
    _core.pack(listed.arrays, stacked)
    n = n_ranks * n_here
    if code == AVG.value and stacked.dtype.kind in "iu":
        return _averaged_exactly(stacked, n)
    is_half = listed.dtype in _HALVES and code not in (MIN.value, MAX.value)
    wide = np.dtype(np.float32) if is_half else stacked.dtype
    with np.errstate(all="ignore"):
        terms = stacked.astype(wide)
        if code == PREMUL:
            _scale(terms, factor)
        run = np.ascontiguousarray(functools.reduce(_UFUNCS.get(code, np.add), terms).astype(wide))

    def finished(total: _Run) -> _Run:
        with np.errstate(all="ignore"):
            if code == AVG.value:
                _scale(total, 1 / n)
            return total.astype(stacked.dtype)

    return run, finished


def _scale(run: _Run, factor: float) -> None:
    """Multiplies in place; of complex numbers both parts, since a factor's imaginary 0 would make NaN of infinity."""
    parts = run.view(run.real.dtype)
    if parts.dtype.kind in "iu":
        parts *= np.array(int(factor), np.int64).astype(parts.dtype)  # wraps, as the sum does
    else:
        parts *= parts.dtype.type(factor)


def _averaged_exactly(stacked: _Run, n: int) -> tuple[_Run, Callable[[_Run], _Run]]:
    """As `combined`, for averages of integers over `n` arrays: quotients and remainders, of which no sum overflows."""
    wide = np.dtype(np.uint64 if stacked.dtype.kind == "u" else np.int64)
    by = wide.type(n)
    terms = stacked.astype(wide)
    run = np.concatenate([(terms // by).sum(0, wide), (terms % by).sum(0, wide)])

    def finished(total: _Run) -> _Run:
        quotients, remainders = total.reshape(2, -1)
        average: _Run = (quotients + remainders // by).astype(stacked.dtype)
        return average

    return run, finished

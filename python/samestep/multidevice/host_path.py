"""Lists of arrays in host memory: a rank first combines its own, in the order of the list, then ranks communicate."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from samestep import _core, arrays
from samestep._util.text import by_rank
from samestep.arrays import ArrayInfo
from samestep.errors import MismatchError
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
    ReduceOp,
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


_MAX_CALL_BYTES = 64  # bytes: names of a verb, an operator and a dtype, and two numbers


def compared(
    group: Group, listed: ArrayList, verb: str, *, code: int = SUM.value, root_array: int = 0
) -> tuple[_core.Work, Callable[[], None]]:
    """An exchange of what the ranks' runs do not show of their calls, and what raises afterwards where it differs."""
    op = "premul" if code == PREMUL else ReduceOp(code).name.lower()
    mine = f"{verb} {len(listed.arrays)} {root_array} {op} {listed.dtype}".encode().ljust(_MAX_CALL_BYTES)
    gathered = np.empty((group.size, _MAX_CALL_BYTES), np.uint8)
    work = group._comm.allgather(np.frombuffer(mine, np.uint8), gathered)

    def check() -> None:
        act, of = listed.act, f"in group {group._comm.name}"
        rows = [row.tobytes().decode().split() for row in gathered]
        verbs, lengths, roots, ops, dtypes = zip(*rows, strict=True)
        for texts, what in (
            (verbs, "the ranks call {}; all must make the same call"),
            ([f"{n} arrays" for n in lengths], "the lists have {}; all must be of one length"),
            ([f"array {i} of root" for i in roots], "the ranks do not agree on the array: {}"),
            ([f"op {name}" for name in ops], "the ranks do not agree on the operator: {}"),
            (dtypes, "the lists are of {}; all must be of one dtype"),
        ):
            if len(set(texts)) > 1:
                raise MismatchError(f"{act} {of}: {what.format(by_rank(texts))}")

    return work, check


def explained(work: _core.Work, check: Callable[[], None]) -> _core.Work:
    """A work on the ranks' runs that says, where these differ, what the calls differ in.

    It is waited for after the exchange that `check` looks at.
    """
    return _Explained(work, check)  # type: ignore[return-value]  # the methods that `Works` calls


class _Explained:
    def __init__(self, work: _core.Work, check: Callable[[], None]) -> None:
        self._work, self._check = work, check

    def done(self) -> bool:
        return self._work.done()

    def wait(self, timeout: float, ends_group: bool, wait_on_host: bool = False) -> None:
        try:
            self._work.wait(timeout, ends_group, wait_on_host)
        except MismatchError:
            self._check()
            raise

    def exception(self) -> Any:
        error = self._work.exception()
        if isinstance(error, MismatchError):
            try:
                self._check()
            except MismatchError as received:
                return received
        return error


@functools.cache
def _alone() -> _core.Communicator:
    return _core.make_self_communicator("check")


def combined(
    listed: ArrayList, code: int, factor: float, n_ranks: int
) -> tuple[_Run, int, float, Callable[[_Run], _Run]]:
    """This rank's arrays reduced to one run.

    Returns:
      The run, in a type wide enough for the sum over all ranks; operator and factor to reduce it with over the
      ranks; and what makes the result of it after that.
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

    # The factors are in the terms already; the ranks still pass `PREMUL`, so that a rank with another op is detected.
    return run, SUM.value if code == AVG.value else code, 1.0, finished


def _scale(run: _Run, factor: float) -> None:
    """Multiplies in place; of complex numbers both parts, since a factor's imaginary 0 would make NaN of infinity."""
    parts = run.view(run.real.dtype)
    if parts.dtype.kind in "iu":
        parts *= np.array(int(factor), np.int64).astype(parts.dtype)  # wraps, as the sum does
    else:
        parts *= parts.dtype.type(factor)


def _averaged_exactly(stacked: _Run, n: int) -> tuple[_Run, int, float, Callable[[_Run], _Run]]:
    """As `combined`, for averages of integers over `n` arrays: quotients and remainders, of which no sum overflows."""
    wide = np.dtype(np.uint64 if stacked.dtype.kind == "u" else np.int64)
    by = wide.type(n)
    terms = stacked.astype(wide)
    run = np.concatenate([(terms // by).sum(0, wide), (terms % by).sum(0, wide)])

    def finished(total: _Run) -> _Run:
        quotients, remainders = total.reshape(2, -1)
        average: _Run = (quotients + remainders // by).astype(stacked.dtype)
        return average

    return run, SUM.value, 1.0, finished

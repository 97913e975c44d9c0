"""Collectives with several arrays on each rank: one for each device, or host arrays.

A rank combines them in host memory before ranks communicate. All ranks give lists of the same length, else all raise
MismatchError.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from samestep import _core, arrays, internal
from samestep._util.deadline import Deadline
from samestep._util.dtypes import numpy_dtype
from samestep.backend import Backend
from samestep.distributed import buffers, groups
from samestep.distributed.groups import WORLD, ReduceOp
from samestep.distributed.requests import started
from samestep.errors import InvalidArgumentError
from samestep.reduce_ops import AVG, BAND, BOR, BXOR, LAND, LOR, MAX, MIN, PREMUL, PROD, SUM, Op, resolve
from samestep.trees.fusion import fused

__all__ = ["all_gather_multigpu", "all_reduce_multigpu", "broadcast_multigpu", "reduce_multigpu"]

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


@functools.cache
def _alone() -> _core.Communicator:
    return _core.make_self_communicator("check")


class Combination:
    """Combines the arrays of a rank into one run of elements, and makes the result of the runs of all ranks."""

    def __init__(self, dtype: str, code: int, factor: float, n_arrays: int) -> None:
        """`n_arrays`: of all ranks. Raises InvalidArgumentError, in the words of allreduce, if the dtype does not have
        the operator."""
        self._code, self._factor, self._n = code, factor, n_arrays
        self._dtype: np.dtype[Any] = numpy_dtype(dtype)
        _alone().allreduce(np.empty(0, self._dtype), None, code, factor)
        kind = self._dtype.kind
        self.is_exact = code == AVG.value and kind in "iu"
        """Quotients and remainders, of which no sum overflows."""
        self.wide = self._dtype
        """Enough for the sum over all ranks."""
        if self.is_exact:
            self.wide = np.dtype(np.uint64 if kind == "u" else np.int64)
        elif dtype in _HALVES and code not in (MIN.value, MAX.value):
            self.wide = np.dtype(np.float32)

    def combined(self, listed: Sequence[Any], rows: _Run) -> _Run:
        """This rank's elements, factors applied, in a row; in two rows, of which ranks sum each, for exact averages."""
        combine = _UFUNCS.get(self._code, np.add)
        is_row = self.wide == self._dtype and not self.is_exact
        term = np.empty(rows.shape[1], self._dtype)
        with np.errstate(all="ignore"):
            for i, x in enumerate(listed):
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
        if self.is_exact:
            return np.divmod(elements.astype(self.wide, copy=False), self.wide.type(self._n))
        wide = elements.astype(self.wide, copy=False)
        if self._code == PREMUL:
            _scale(wide, self._factor)
        return (wide,)

    def result(self, rows: _Run) -> _Run:
        """The elements of the result, from the rows of `combined` that ranks have reduced."""
        with np.errstate(all="ignore"):
            if self.is_exact:
                exact: _Run = (rows[0] + rows[1] // self.wide.type(self._n)).astype(self._dtype)
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


_LITTLE_NBYTES = 128 << 10  # for which memory that a host's ranks share does not pay


def _named(act: str, given: Sequence[Any], like: arrays.ArrayInfo) -> _core.UserCall:
    """For texts of errors of what is started meanwhile."""
    n = len(given)
    return _core.UserCall(f"{act} of {n} array{'s' * (n > 1)} of {like.dtype}[{buffers.count(like)}]")


class Call:
    """A call on a rank's list of arrays, all of one dtype and count, which are `written`, or replaced."""

    def __init__(self, group: Backend, act: str, given: Any, name: str, *, written: bool = True) -> None:
        if isinstance(given, (list, tuple)) and not given:
            raise InvalidArgumentError(f"{act}: {name} must have at least one array")
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"{act}: {name} must be a list or tuple of arrays, got {type(given).__name__}")
        self.group, self.act, self.arrays = group, act, given
        self.like = buffers.described(given[0], act, f"{name}[0]")
        self.infos = buffers.listed(given, len(given), self.like, act, name, written=written)
        for x, known in zip(given, self.infos, strict=True):
            if known.device != "cpu":
                _core.refuse_capture(x, act)
        self._deadline = Deadline(group.timeout)

    def rooted(self, name: str, rank: Any, group_rank: Any, array: Any) -> tuple[int, int]:
        """The rank of the group that `name=` is, and the index of its array that `name_tensor=` is, or an error."""
        root = groups.rank_in(self.group, self.act, name, rank, group_rank)
        index = groups.whole_number(array, self.act, f"{name}_tensor")
        if not 0 <= index < len(self.arrays):
            raise InvalidArgumentError(
                f"{self.act}: {name}_tensor {index} is outside the list of {len(self.arrays)} arrays"
            )
        return root, index

    def memory(self, shape: tuple[int, ...], dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
        """An array that the ranks of a host share, if they can and it pays."""
        kind = np.dtype(dtype)
        new = self.group.empty if math.prod(shape) * kind.itemsize > _LITTLE_NBYTES else np.empty
        return new(shape, kind)

    def named(self) -> _core.UserCall:
        """For texts of errors of what is started meanwhile."""
        return _named(self.act, self.arrays, self.like)

    def await_streams(self, given: Sequence[Any], *, may_be_late: bool = False) -> None:
        """Before a copy, which has no deadline. A call that has not waited until now gets the time of the group."""
        left = self._deadline.left()
        on_device = [x for x in given if arrays.info(x).device != "cpu"]
        with self.named():
            internal.await_streams(self.group, on_device, None if may_be_late and left <= 0 else left)

    def start(  # noqa: PLR0917 - as the core takes them
        self,
        verb: str,
        run: Any,
        out: Any,
        finish: Callable[[], None],
        async_op: bool,
        writes: Sequence[Any],
        *,
        code: int = SUM.value,
        root: int = -1,
        array: int = 0,
    ) -> Any:
        """A collective of the ranks' runs, whose headers show the call on the lists: ranks compare that.

        Args:
          verb: "allreduce", "reduce", "bcast" or "allgather".
          run: of elements, which this rank has made of its list.
          out: what receives the result; `run` itself for all but allgather.
          finish: stores it.
          code: the operator of the call; the runs may be combined by another one.
          root, array: the rank that gets or sends, -1 for a verb without one; which of its arrays.
        """
        # The runs are summed for AVG and PREMUL: `Combination` applies divisors and factors.
        op = SUM.value if code in (AVG.value, PREMUL) else code
        listed = self.like.dtype, code, len(self.arrays), buffers.count(self.like), array
        comm = internal.communicator(self.group)
        work = _core.start_list_on_host(comm, verb, run, out, op, root, *listed)
        return started(self.group, work, finish, async_op, self._deadline, writes=writes)

    def store(
        self, result: Callable[[], Any], written: Collection[int] | None = None, into: Any = None
    ) -> None:
        """Store a result in the arrays, or some; those that cannot be written are replaced by new ones.

        Each of them gets all of it. Or it is divided among those of `into`, a list and their infos.
        """
        given, infos = into or (self.arrays, self.infos)
        which = range(len(infos)) if written is None else written
        targets = arrays.targets([given[i] for i in which], [infos[i] for i in which])
        self.await_streams(targets, may_be_late=True)
        run = result()
        for part in [targets] if into else [[x] for x in targets]:
            _core.unpack(run, part)
        arrays.deliver(given, infos, which, targets)


def _reduce(call: Call, op: Op, async_op: bool, root: int = -1, array: int = 0) -> Any:
    """Reduces over all arrays into all of them, or into one of `root`."""
    with call.named():
        code, factor = resolve(op, call.act)
        call.await_streams(call.arrays)
        how = Combination(call.like.dtype, code, factor, call.group.size * len(call.arrays))
        wide = 1 + how.is_exact, buffers.count(call.like)
        rows = how.combined(call.arrays, call.memory(wide, how.wide))
        written = range(array, array + (call.group.rank == root)) if root >= 0 else None
        return call.start(
            "reduce" if root >= 0 else "allreduce",
            rows,
            rows,
            lambda: call.store(lambda: how.result(rows), written),
            async_op,
            call.arrays,
            code=code,
            root=root,
            array=array,
        )


def broadcast_multigpu(
    tensor_list: Sequence[Any],
    src: int | None = None,
    group: Any = WORLD,
    async_op: bool = False,
    src_tensor: int = 0,
    *,
    group_src: int | None = None,
) -> Any:
    """Give all arrays of all ranks the elements of `tensor_list[src_tensor]` of rank `src`."""
    if (of := groups.resolve(group)) is None:
        return None
    call = Call(of, "broadcast_multigpu", tensor_list, "tensor_list")
    root, index = call.rooted("src", src, group_src, src_tensor)
    with call.named():
        written = set(range(len(call.arrays)))
        run = call.memory((call.like.nbytes,))
        if of.rank == root:
            written -= {index}
            call.await_streams(call.arrays)
            _core.pack([call.arrays[index]], run)
        store = functools.partial(call.store, lambda: run, sorted(written))
        return call.start("bcast", run, run, store, async_op, call.arrays, root=root, array=index)


def all_reduce_multigpu(
    tensor_list: Sequence[Any], op: Op = ReduceOp.SUM, group: Any = WORLD, async_op: bool = False
) -> Any:
    """Reduce over all arrays of all ranks; all of them get the result.

    Example:
      >>> import numpy as np, samestep.distributed as dist
      >>> dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
      >>> tensors = [np.ones(1) for _ in range(8)]
      >>> dist.all_reduce_multigpu(tensors)
      >>> float(sum(tensors)[0])
      64.0
      >>> dist.destroy_process_group()
    """
    if (of := groups.resolve(group)) is None:
        return None
    act = "all_reduce_multigpu"
    if not async_op and isinstance(tensor_list, (list, tuple)) and tensor_list:
        fast = _core.fast_tree(tensor_list)  # which the core takes as it lies
        if fast is not None and arrays.is_array(tensor_list[0]):
            with _named(act, tensor_list, arrays.info(tensor_list[0])):
                if fused(of).allreduce_list(fast, *resolve(op, act), of.timeout):
                    return None
    return _reduce(Call(of, act, tensor_list, "tensor_list"), op, async_op)


def reduce_multigpu(  # noqa: PLR0917 - positions that scripts rely on
    tensor_list: Sequence[Any],
    dst: int | None = None,
    op: Op = ReduceOp.SUM,
    group: Any = WORLD,
    async_op: bool = False,
    dst_tensor: int = 0,
    *,
    group_dst: int | None = None,
) -> Any:
    """Reduce over all arrays of all ranks; `tensor_list[dst_tensor]` of rank `dst` gets the result."""
    if (of := groups.resolve(group)) is None:
        return None
    call = Call(of, "reduce_multigpu", tensor_list, "tensor_list")
    return _reduce(call, op, async_op, *call.rooted("dst", dst, group_dst, dst_tensor))


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Any = WORLD,
    async_op: bool = False,
) -> Any:
    """Gather all arrays of all ranks into every list.

    Args:
      output_tensor_lists: as many lists as there are inputs, each on its input's device; input j of rank k arrives
        in each at `k * len(input_tensor_list) + j`.
      input_tensor_list: this rank's arrays.
      group: `group.WORLD` or what `new_group` returned.
      async_op: return a `Request` at once.
    """
    verb = "all_gather_multigpu"
    if (of := groups.resolve(group)) is None:
        return None
    call = Call(of, verb, input_tensor_list, "input_tensor_list", written=False)
    n = len(call.arrays)
    if not isinstance(output_tensor_lists, (list, tuple)):
        kind = type(output_tensor_lists).__name__
        raise TypeError(f"{verb}: output_tensor_lists must be a list of lists, got {kind}")
    if len(output_tensor_lists) != n:
        raise InvalidArgumentError(
            f"{verb}: output_tensor_lists must have {n} lists, as there are inputs, got {len(output_tensor_lists)}"
        )
    receives = [
        (
            tensors,
            buffers.listed(tensors, of.size * n, call.like, verb, f"output_tensor_lists[{i}]", written=True),
        )
        for i, tensors in enumerate(output_tensor_lists)
    ]
    with call.named():
        # Bytes on all ranks, whatever their arrays are: the plan of an operation depends on its dtype.
        run, joined = (call.memory((ranks * n * call.like.nbytes,)) for ranks in (of.size, 1))
        call.await_streams(call.arrays)
        _core.pack(call.arrays, joined)

        def finish() -> None:
            for into in receives:
                call.store(lambda: run, into=into)

        targets = [x for tensors, _ in receives for x in tensors]
        return call.start("allgather", joined, run, finish, async_op, targets)

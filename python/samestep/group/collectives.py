"""Collectives on arrays, as methods of `Backend`."""

from __future__ import annotations

import functools
from typing import Any, TypeVar, overload

import numpy as np

from samestep import _core, arrays
from samestep.arrays.libraries import stream_of
from samestep.errors import UnavailableError
from samestep.group.compiled import one_buffer, traceable
from samestep.group.method_support import MethodSupport
from samestep.group.work import Enqueued, Work
from samestep.reduce_ops import Op, resolve

_A = TypeVar("_A")  # an array, or a number


def _release(group: Any, wide: Any, made_in: int | None) -> None:
    """Before `wide` is dropped: its memory goes back to the stream in which it was made.

    The next owner of the memory uses it there, and waits for no other stream in which `wide` is used.
    """
    if stream_of(wide) != made_in:
        group._await_streams([wide], group._timeout)


def _widened(group: Any, inner: _core.Work, wide: Any) -> Enqueued:
    """An operation on `wide` whose result another rank gets."""
    return Enqueued(inner, functools.partial(_release, group, wide, stream_of(wide)))


def _rounded(group: Any, inner: _core.Work, wide: Any, target: Any) -> Enqueued:
    """An operation whose result `wide` is rounded into `target` when it has ended."""

    in_graph = _core.is_captured(target)
    made_in = stream_of(wide)

    def require_stream() -> None:
        # Rounded in a capture that lacks the operation, the result would be there only after a launch of the graph; in
        # none, where one has the operation, it would be there before.
        if not in_graph:
            _core.refuse_capture(target, "wait")
        elif not _core.is_captured(target):
            raise UnavailableError("wait: the operation is part of a graph; wait inside of the capture")
        elif stream_of(wide) != made_in:
            raise UnavailableError(
                "wait: the operation is part of a graph; wait in the stream in which it was called"
            )

    def complete() -> None:
        arrays.of(target).store_rounded(wide, target)
        _release(group, wide, made_in)

    return Enqueued(inner, complete, require_stream, [target])


class CollectiveMethods(MethodSupport):
    """Collectives on arrays. All ranks of a group call the same collectives in the same order.

    Each blocking method has a non-blocking variant `i...` that returns a `Work`. Rules for all of them:

    * Arrays may come from any library and have any memory layout; strided arrays are staged.
    * A writable array is changed in place, and the result is always returned. For an array that is not writable
      (JAX, MLX, read-only NumPy) the result is a new array of the same library. With `out=` the result is written
      there, and `x` keeps its elements.
    * `x` may be a Python or NumPy number; then the result is a number.
    * `timeout`: seconds until `TimeoutError`, after which the group cannot be used; by default the timeout of the
      group. With `timeout` the host also waits for the device to finish; without it only the device's stream waits.
    * If ranks differ in shape, dtype, op or root, every rank raises `MismatchError` and the group stays usable.
    """

    # ---- reductions

    @_core.fast_method
    @traceable
    def allreduce(self, x: _A, op: Op = "sum", *, out: _A | None = None, timeout: float | None = None) -> _A:
        """Reduce `x` over all ranks, elementwise; every rank gets the result.

        Args:
          x: array of any shape, the same shape and dtype on all ranks.
          op: an operator, see `ReduceOp`.
          out: array of the same shape and dtype for the result.
          timeout: seconds, see the class.

        Returns:
          `x` itself, or `out`, or a new array if `x` is not writable. The bits are the same on all ranks.

        Raises:
          InvalidArgumentError: the dtype does not support `op`, or `out` does not fit; nothing was sent.
          MismatchError: on every rank, if the ranks differ in shape, dtype or op.
          TimeoutError, PeerLostError: ranks are late or have ended; the group cannot be used any more.

        Source: MPI 5.0, section 6.9.6 (MPI_Allreduce).

        Example:
          >>> import numpy as np, samestep as ss
          >>> backend = ss.initialize()
          >>> backend.allreduce(np.array([1.0, 2.0]), "sum") / backend.size
          array([1., 2.])
        """
        limit = self._checked(timeout)
        return self.iallreduce(x, op, out=out)._wait_blocking(limit)

    def iallreduce(self, x: _A, op: Op = "sum", *, out: _A | None = None) -> Work[_A]:
        """Non-blocking `allreduce`; the result of the Work is what `allreduce` returns."""
        code, factor = resolve(op, "allreduce")
        self._require_exact(x, code, factor, "allreduce")
        x, is_number = arrays.readable(x, "allreduce")
        into, finish = self._output_like(x, out, is_number, "allreduce")
        return self._enqueue_allreduce(x, into, code, factor).as_work(self._timeout, finish)

    def _enqueue_allreduce(
        self, x: Any, into: Any, code: int, factor: float, divisor: float = 1.0
    ) -> Enqueued:
        """`into`: receives the result; None: `x` does. `divisor`: of MEAN."""
        target = x if into is None else into
        wide = self._to_average(x, target, code, "allreduce")
        if wide is None:
            return Enqueued(self._comm.allreduce(x, into, code, factor, None, divisor))
        return _rounded(self, self._comm.allreduce(wide, None, code, factor, x), wide, target)

    @_core.fast_method
    @traceable
    def reduce(
        self,
        x: _A,
        op: Op = "sum",
        root: int = 0,
        *,
        out: _A | None = None,
        timeout: float | None = None,
    ) -> _A:
        """Reduce `x` over all ranks, elementwise; root gets the result.

        Args:
          x: array of any shape, the same shape and dtype on all ranks.
          op: an operator, see `ReduceOp`.
          root: the rank, of this group, that gets the result.
          out: at root, an array of the same shape and dtype for the result.
          timeout: seconds, see the class.

        Returns:
          At root as `allreduce`; elsewhere `x`, unchanged.

        Source: MPI 5.0, section 6.9.1 (MPI_Reduce).
        """
        limit = self._checked(timeout)
        return self.ireduce(x, op, root, out=out)._wait_blocking(limit)

    def ireduce(self, x: _A, op: Op = "sum", root: int = 0, *, out: _A | None = None) -> Work[_A]:
        """Non-blocking `reduce`."""
        code, factor = resolve(op, "reduce")
        self._require_exact(x, code, factor, "reduce")
        array, is_number = arrays.readable(x, "reduce")
        root = self._rank_number(root, "reduce", "root")
        if self.rank == root:
            into, finish = self._output_like(array, out, is_number, "reduce")
        else:
            into, finish = None, (lambda: array.item() if is_number else array)
        return self._enqueue_reduce(array, into, code, factor, root).as_work(self._timeout, finish)

    def _enqueue_reduce(self, x: Any, into: Any, code: int, factor: float, root: int) -> Enqueued:
        """`into`: at root, receives the result; None: `x` does."""
        target = x if into is None else into
        wide = self._to_average(x, target, code, "reduce")
        if wide is None:
            return Enqueued(self._comm.reduce(x, into, code, factor, root))
        inner = self._comm.reduce(wide, None, code, factor, root, x)
        return _rounded(self, inner, wide, target) if self.rank == root else _widened(self, inner, wide)

    @_core.fast_method
    @traceable
    def reduce_scatter(
        self, x: _A, op: Op = "sum", *, out: _A | None = None, timeout: float | None = None
    ) -> _A:
        """Reduce `x` over all ranks, elementwise; rank r gets block r of the result.

        Args:
          x: array of shape `(size, *shape)`, the same on all ranks; not changed.
          op: an operator, see `ReduceOp`.
          out: array of shape `shape` for the result.
          timeout: seconds, see the class.

        Returns:
          `out`, or a new array of shape `shape`.

        Source: MPI 5.0, section 6.10.1 (MPI_Reduce_scatter_block).
        """
        limit = self._checked(timeout)
        return self.ireduce_scatter(x, op, out=out)._wait_blocking(limit)

    def ireduce_scatter(self, x: _A, op: Op = "sum", *, out: _A | None = None) -> Work[_A]:
        """Non-blocking `reduce_scatter`."""
        code, factor = resolve(op, "reduce_scatter")
        shape = self._block_shape(arrays.info(x, "reduce_scatter").shape, "reduce_scatter")
        into, finish = self._output_of_shape(x, shape, out)
        wide = self._to_average(x, into, code, "reduce_scatter")
        if wide is not None:
            result = arrays.of(into).widen(into)  # as many elements of its library
            inner = self._comm.reduce_scatter(wide, result, code, factor, x)
            return _rounded(self, inner, result, into).as_work(self._timeout, finish)
        return Work(self._comm.reduce_scatter(x, into, code, factor), self._timeout, finish)

    # ---- one to all, all to one

    @_core.fast_method
    @traceable
    def bcast(self, x: _A, root: int = 0, *, out: _A | None = None, timeout: float | None = None) -> _A:
        """Broadcast the elements of root's array to all ranks.

        Args:
          x: array, the same shape and dtype on all ranks.
          root: the rank, of this group, whose elements are sent.
          out: array for the result, on every rank; root's `out` is written as well.
          timeout: seconds, see the class.

        Returns:
          `x`, or `out`, or a new array if `x` is not writable.

        Source: MPI 5.0, section 6.4 (MPI_Bcast).
        """
        limit = self._checked(timeout)
        return self.ibcast(x, root, out=out)._wait_blocking(limit)

    def ibcast(self, x: _A, root: int = 0, *, out: _A | None = None) -> Work[_A]:
        """Non-blocking `bcast`."""
        array, is_number = arrays.readable(x, "bcast")
        root = self._rank_number(root, "bcast", "root")
        if self.rank == root:
            if out is None:
                return Work(
                    self._comm.bcast(array, root),
                    self._timeout,
                    lambda: array.item() if is_number else arrays.as_received(array),
                )
            _core.settle([array])
            _core.settle([out], to_write=True)
            arrays.copy(array, out, "bcast")
            return Work(self._comm.bcast(out, root), self._timeout, lambda: out)
        if out is not None and array is not None:
            known = arrays.info(array, "bcast")
            self._require_fitting(out, known.dtype, known.shape, "bcast")
        into, finish = self._output_like(array, out, is_number, "bcast")
        return Work(self._comm.bcast(array if into is None else into, root), self._timeout, finish)

    @overload
    def gather(
        self, x: complex, root: int = 0, *, out: Any = None, timeout: float | None = None
    ) -> np.ndarray[Any, Any] | None: ...
    @overload
    def gather(
        self, x: _A, root: int = 0, *, out: _A | None = None, timeout: float | None = None
    ) -> _A | None: ...
    @one_buffer
    def gather(self, x: Any, root: int = 0, *, out: Any = None, timeout: float | None = None) -> Any:
        """Gather the arrays of all ranks at root.

        Args:
          x: array of any shape, the same shape and dtype on all ranks.
          root: the rank, of this group, that gets the arrays.
          out: at root, an array of shape `(size, *x.shape)` for the result.
          timeout: seconds, see the class.

        Returns:
          At root `out`, or a new array of that shape, whose entry r is the array of rank r; elsewhere None.

        Source: MPI 5.0, section 6.5 (MPI_Gather).
        """
        limit = self._checked(timeout)
        return self.igather(x, root, out=out)._wait_blocking(limit)

    @overload
    def igather(self, x: complex, root: int = 0, *, out: Any = None) -> Work[np.ndarray[Any, Any] | None]: ...
    @overload
    def igather(self, x: _A, root: int = 0, *, out: _A | None = None) -> Work[_A | None]: ...
    def igather(self, x: Any, root: int = 0, *, out: Any = None) -> Work[Any]:
        """Non-blocking `gather`."""
        x, _ = arrays.readable(x, "gather")
        root = self._rank_number(root, "gather", "root")
        if self.rank != root:
            return Work(self._comm.gather(x, None, root), self._timeout)
        into, finish = self._output_of_shape(x, (self.size, *arrays.info(x, "gather").shape), out)
        return Work(self._comm.gather(x, into, root), self._timeout, finish)

    @overload
    def scatter(
        self, x: None = None, root: int = 0, *, out: None = None, timeout: float | None = None
    ) -> Any: ...
    @overload
    def scatter(
        self, x: _A | None = None, root: int = 0, *, out: _A | None = None, timeout: float | None = None
    ) -> _A: ...
    @one_buffer
    def scatter(self, x: Any = None, root: int = 0, *, out: Any = None, timeout: float | None = None) -> Any:
        """Scatter the blocks of root's array: rank r gets block r.

        Args:
          x: at root, shape `(size, *shape)`; elsewhere None.
          root: the rank, of this group, whose blocks are sent.
          out: array of shape `shape` for the result; None for a new array of root's library.
          timeout: seconds, see the class.

        Source: MPI 5.0, section 6.6 (MPI_Scatter).
        """
        limit = self._checked(timeout)
        return self._start_scatter(x, root, out, limit)._wait_blocking(limit)

    @overload
    def iscatter(self, x: None = None, root: int = 0, *, out: None = None) -> Work[Any]: ...
    @overload
    def iscatter(self, x: _A | None = None, root: int = 0, *, out: _A | None = None) -> Work[_A]: ...
    def iscatter(self, x: Any = None, root: int = 0, *, out: Any = None) -> Work[Any]:
        """Non-blocking `scatter`; the call itself waits once, for the shape and dtype from root."""
        return self._start_scatter(x, root, out, None)

    def _start_scatter(self, x: Any, root: int, out: Any, limit: float | None) -> Work[Any]:
        def checked() -> tuple[int, ...]:
            known = arrays.info(x, "scatter")
            shape = self._block_shape(known.shape, "scatter")
            self._require_fitting(out, known.dtype, shape, "scatter")
            return shape

        library, dtype, shape = self._broadcast_metadata(x, root, "scatter", checked, limit, out=out)
        into, finish = self._output_of_library(library, dtype, shape, x, out)
        return Work(self._comm.scatter(x if self.rank == root else None, into, root), self._timeout, finish)

    # ---- all to all

    @overload
    def allgather(
        self, x: complex, out: Any = None, *, timeout: float | None = None
    ) -> np.ndarray[Any, Any]: ...
    @overload
    def allgather(self, x: _A, out: _A | None = None, *, timeout: float | None = None) -> _A: ...
    @_core.fast_method
    @traceable
    def allgather(self, x: Any, out: Any = None, *, timeout: float | None = None) -> Any:
        """Gather the arrays of all ranks at every rank.

        Args:
          x: array, the same shape and dtype on all ranks.
          out: array of shape `(size, *x.shape)` for the result.
          timeout: seconds, see the class.

        Returns:
          `out`, or a new array of that shape, whose entry r is the array of rank r.

        Source: MPI 5.0, section 6.7 (MPI_Allgather).

        Example:
          >>> import numpy as np, samestep as ss
          >>> ss.initialize().allgather(np.array([7, 8])).shape
          (1, 2)
        """
        limit = self._checked(timeout)
        return self.iallgather(x, out)._wait_blocking(limit)

    @overload
    def iallgather(self, x: complex, out: Any = None) -> Work[np.ndarray[Any, Any]]: ...
    @overload
    def iallgather(self, x: _A, out: _A | None = None) -> Work[_A]: ...
    def iallgather(self, x: Any, out: Any = None) -> Work[Any]:
        """Non-blocking `allgather`."""
        x, _ = arrays.readable(x, "allgather")
        into, finish = self._output_of_shape(x, (self.size, *arrays.info(x, "allgather").shape), out)
        return Work(self._comm.allgather(x, into), self._timeout, finish)

    @_core.fast_method
    @traceable
    def alltoall(self, x: _A, out: _A | None = None, *, timeout: float | None = None) -> _A:
        """Exchange blocks: block i of `x` is sent to rank i, and block i of the result is received from rank i.

        Args:
          x: array whose first extent is a multiple of `size`, the same shape and dtype on all ranks; not changed.
          out: array of the same shape for the result.
          timeout: seconds, see the class.

        Source: MPI 5.0, section 6.8 (MPI_Alltoall).
        """
        limit = self._checked(timeout)
        return self.ialltoall(x, out)._wait_blocking(limit)

    def ialltoall(self, x: _A, out: _A | None = None) -> Work[_A]:
        """Non-blocking `alltoall`."""
        shape = arrays.info(x, "alltoall").shape
        self._require_blocks(shape, "alltoall")
        into, finish = self._output_of_shape(x, shape, out)
        return Work(self._comm.alltoall(x, into), self._timeout, finish)

    @_core.fast_method
    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until every rank of the group has called it.

        Args:
          timeout: seconds, see the class.

        Source: MPI 5.0, section 6.3 (MPI_Barrier).
        """
        limit = self._checked(timeout)
        self.ibarrier()._wait_blocking(limit)

    def ibarrier(self) -> Work[None]:
        """Non-blocking `barrier`; the Work is done when every rank has called it."""
        return Work(self._comm.barrier(), self._timeout)

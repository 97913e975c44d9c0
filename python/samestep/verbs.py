"""The collective verbs on arrays, as methods of `Backend`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from samestep import _core, arrays
from samestep.errors import InvalidArgumentError, MismatchError
from samestep.reduce_ops import resolve
from samestep.work import Limit, Work, seconds

__all__ = ["CollectiveVerbs", "require_backend"]

_Self = TypeVar("_Self", bound="CollectiveVerbs")


def require_backend(function: str, given: Any) -> None:
    """That a function of a backend and something else got the backend first.

    Raises:
      TypeError: it did not.
    """
    if not isinstance(given, CollectiveVerbs):
        raise TypeError(
            f"{function}: the first argument is the backend, e.g. samestep.get_distributed_backend(), "
            f"got {type(given).__name__}"
        )


class CollectiveVerbs:
    """Collectives on arrays. All ranks of a group call the same verbs in the same order.

    Each blocking verb has a twin `i...` that returns a `Work` at once. Rules for all of them:

    * Arrays may come from any library and lie anyhow in memory; strided ones are staged.
    * The result is written in place where the array can be written, and is always returned; for an array
      that cannot be written (JAX, read-only NumPy) a new one of the same library is returned. `out=`
      names another array to receive into; then `x` is left as it was.
    * A Python or NumPy number may stand for an array; then a number is returned.
    * `timeout`: seconds until `TimeoutError`, after which the group cannot be used any more; by default the
      group's. With it this process waits also for what a device does, which otherwise only streams wait for.
      Where ranks disagree in shape, dtype, op or root, `MismatchError` is raised on every rank and the group
      stays usable.
    """

    _comm: _core.Communicator
    _timeout: float

    @property
    def rank(self) -> int:
        """This process's number in the group, 0 <= rank < size."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self._comm.size

    def allgather_object(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """Every rank gets all ranks' objects."""
        raise NotImplementedError  # in objects.py

    def bcast_object(self, obj: Any = None, *, root: int = 0, timeout: float | None = None) -> Any:
        """Every rank gets root's object."""
        raise NotImplementedError  # in objects.py

    # ---- reductions

    def allreduce(self, x: Any, op: Any = "sum", *, out: Any = None, timeout: float | None = None) -> Any:
        """Reduce over all ranks; every rank gets the result.

        Args:
          x: array of any shape, the same shape and dtype on all ranks.
          op: an operator, see `ReduceOp`.
          out: array of the same shape and dtype to receive into.
          timeout: seconds, see the class.

        Returns:
          `x` itself, or `out`, or a new array where `x` cannot be written. The same bits on all ranks.

        Raises:
          InvalidArgumentError: dtype, op or `out` do not fit; nothing has happened.
          MismatchError: ranks disagree (on every rank).

        Source: MPI 5.0, section 6.9.6 (MPI_Allreduce).

        Example:
          >>> import numpy as np, samestep as ss
          >>> backend = ss.initialize()
          >>> backend.allreduce(np.array([1.0, 2.0]), "sum") / backend.size
          array([1., 2.])
        """
        return self._within(timeout).iallreduce(x, op, out=out)._wait_blocking(None)

    def iallreduce(self, x: Any, op: Any = "sum", *, out: Any = None) -> Work:
        """`allreduce` without waiting; the Work's result is what `allreduce` returns."""
        code, factor = resolve(op)
        x, is_number = arrays.readable(x, "allreduce")
        into, finish = self._place(x, out, is_number)
        return Work(self._comm.all_reduce(x, into, code, factor), self._timeout, finish)

    def reduce(
        self, x: Any, op: Any = "sum", *, root: int = 0, out: Any = None, timeout: float | None = None
    ) -> Any:
        """Reduce over all ranks; root gets the result.

        Returns:
          At root as `allreduce`; elsewhere `x`, whose elements are left as they were, AVG included.

        Source: MPI 5.0, section 6.9.1 (MPI_Reduce).
        """
        return self._within(timeout).ireduce(x, op, root=root, out=out)._wait_blocking(None)

    def ireduce(self, x: Any, op: Any = "sum", *, root: int = 0, out: Any = None) -> Work:
        """`reduce` without waiting."""
        code, factor = resolve(op)
        x, is_number = arrays.readable(x, "reduce")
        root = self._rank_number(root, "reduce", "root")
        if self.rank == root:
            into, finish = self._place(x, out, is_number)
        else:
            into, finish = None, (lambda: x.item() if is_number else x)
        return Work(self._comm.reduce(x, into, code, factor, root), self._timeout, finish)

    def reduce_scatter(
        self, x: Any, op: Any = "sum", *, out: Any = None, timeout: float | None = None
    ) -> Any:
        """Reduce over all ranks; rank r gets block r of the result.

        Args:
          x: shape `(size, *shape)`; left as it is.
          op: an operator, see `ReduceOp`.
          out: shape `shape`.
          timeout: seconds, see the class.

        Returns:
          `out`, or a new array of shape `shape`.

        Source: MPI 5.0, section 6.10.1 (MPI_Reduce_scatter_block).
        """
        return self._within(timeout).ireduce_scatter(x, op, out=out)._wait_blocking(None)

    def ireduce_scatter(self, x: Any, op: Any = "sum", *, out: Any = None) -> Work:
        """`reduce_scatter` without waiting."""
        code, factor = resolve(op)
        shape = self._blocks(x, "reduce_scatter")
        into, finish = self._receive(x, shape, out)
        return Work(self._comm.reduce_scatter(x, into, code, factor), self._timeout, finish)

    # ---- one to all, all to one

    def bcast(self, x: Any, *, root: int = 0, out: Any = None, timeout: float | None = None) -> Any:
        """Give every rank root's array.

        Args:
          x: array, the same shape and dtype on all ranks.
          root: the rank, of this group, whose elements are sent.
          out: array to receive into, on every rank; root's `out` is written too.
          timeout: seconds, see the class.

        Returns:
          `x`, or `out`, or a new array where `x` cannot be written.

        Source: MPI 5.0, section 6.4 (MPI_Bcast).
        """
        return self._within(timeout).ibcast(x, root=root, out=out)._wait_blocking(None)

    def ibcast(self, x: Any, *, root: int = 0, out: Any = None) -> Work:
        """`bcast` without waiting."""
        x, is_number = arrays.readable(x, "bcast")
        root = self._rank_number(root, "bcast", "root")
        if self.rank == root:
            if out is None:
                return Work(
                    self._comm.broadcast(x, root), self._timeout, lambda: x.item() if is_number else x
                )
            arrays.copy(x, out, "bcast")
            return Work(self._comm.broadcast(out, root), self._timeout, lambda: out)
        if out is not None and x is not None:
            known = arrays.info(x)
            self._require_fitting(out, known.dtype, known.shape, "bcast")
        into, finish = self._place(x, out, is_number)
        return Work(self._comm.broadcast(x if into is None else into, root), self._timeout, finish)

    def gather(self, x: Any, *, root: int = 0, out: Any = None, timeout: float | None = None) -> Any:
        """Root gets all ranks' arrays.

        Returns:
          At root `out`, or a new array, of shape `(size, *x.shape)`; elsewhere None.

        Source: MPI 5.0, section 6.5 (MPI_Gather).
        """
        return self._within(timeout).igather(x, root=root, out=out)._wait_blocking(None)

    def igather(self, x: Any, *, root: int = 0, out: Any = None) -> Work:
        """`gather` without waiting."""
        x, _ = arrays.readable(x, "gather")
        root = self._rank_number(root, "gather", "root")
        if self.rank != root:
            return Work(self._comm.gather(x, None, root), self._timeout)
        into, finish = self._receive(x, (self.size, *arrays.info(x).shape), out)
        return Work(self._comm.gather(x, into, root), self._timeout, finish)

    def scatter(self, x: Any = None, *, root: int = 0, out: Any = None, timeout: float | None = None) -> Any:
        """Rank r gets block r of root's array.

        Args:
          x: at root, shape `(size, *shape)`; elsewhere None.
          root: the rank, of this group, whose blocks are sent.
          out: array of shape `shape` to receive into; without it a new one of root's library is returned.
          timeout: seconds, see the class.

        Source: MPI 5.0, section 6.6 (MPI_Scatter).
        """
        return self._within(timeout).iscatter(x, root=root, out=out)._wait_blocking(None)

    def iscatter(self, x: Any = None, *, root: int = 0, out: Any = None) -> Work:
        """`scatter` without waiting for the data; ranks meet once to learn what will come."""

        def checked() -> tuple[int, ...]:
            shape = self._blocks(x, "scatter")
            self._require_fitting(out, arrays.info(x).dtype, shape, "scatter")
            return shape

        library, dtype, shape = self._announced(x, root, "scatter", checked)
        into = arrays.new_of(library, dtype, shape) if out is None else out
        finish = (lambda: arrays.finish_for(library, into)) if out is None else (lambda: out)
        return Work(self._comm.scatter(x if self.rank == root else None, into, root), self._timeout, finish)

    # ---- all to all

    def allgather(self, x: Any, *, out: Any = None, timeout: float | None = None) -> Any:
        """Every rank gets all ranks' arrays.

        Args:
          x: array, the same shape and dtype on all ranks.
          out: array of shape `(size, *x.shape)` to receive into.
          timeout: seconds, see the class.

        Returns:
          `out`, or a new array of that shape; entry r is rank r's.

        Source: MPI 5.0, section 6.7 (MPI_Allgather).

        Example:
          >>> import numpy as np, samestep as ss
          >>> ss.initialize().allgather(np.array([7, 8])).shape
          (1, 2)
        """
        return self._within(timeout).iallgather(x, out=out)._wait_blocking(None)

    def iallgather(self, x: Any, *, out: Any = None) -> Work:
        """`allgather` without waiting."""
        x, _ = arrays.readable(x, "allgather")
        into, finish = self._receive(x, (self.size, *arrays.info(x).shape), out)
        return Work(self._comm.all_gather(x, into), self._timeout, finish)

    def alltoall(self, x: Any, *, out: Any = None, timeout: float | None = None) -> Any:
        """Block i of `x` goes to rank i; block i of the result comes from rank i.

        Args:
          x: array whose first extent is a multiple of `size`, the same shape and dtype on all ranks.
          out: array of the same shape to receive into.
          timeout: seconds, see the class.

        Source: MPI 5.0, section 6.8 (MPI_Alltoall).
        """
        return self._within(timeout).ialltoall(x, out=out)._wait_blocking(None)

    def ialltoall(self, x: Any, *, out: Any = None) -> Work:
        """`alltoall` without waiting."""
        shape = arrays.info(x).shape
        if not shape or shape[0] % self.size:
            raise InvalidArgumentError(
                f"alltoall: the first extent of shape {shape} is no multiple of the {self.size} ranks"
            )
        into, finish = self._receive(x, shape, out)
        return Work(self._comm.all_to_all(x, into), self._timeout, finish)

    # ---- ragged forms: arrays that differ in their first extent

    def allgatherv(self, x: Any, *, out: Any = None, timeout: float | None = None) -> Any:
        """All ranks' arrays joined along axis 0, where they may differ in length.

        Returns:
          `out`, or a new array of shape `(sum of first extents, *x.shape[1:])`.

        Source: MPI 5.0, section 6.7 (MPI_Allgatherv).
        """
        return self._within(timeout).iallgatherv(x, out=out)._wait_blocking(None)

    def iallgatherv(self, x: Any, *, out: Any = None) -> Work:
        """`allgatherv` without waiting for the data; ranks meet once to learn the lengths."""
        counts, shape = self._ragged(x, "allgatherv")
        into, finish = self._receive(x, shape, out)
        return Work(self._comm.all_gather_v(x, into, counts), self._timeout, finish)

    def gatherv(self, x: Any, *, root: int = 0, out: Any = None, timeout: float | None = None) -> Any:
        """At root, all ranks' arrays joined along axis 0; elsewhere None."""
        return self._within(timeout).igatherv(x, root=root, out=out)._wait_blocking(None)

    def igatherv(self, x: Any, *, root: int = 0, out: Any = None) -> Work:
        """`gatherv` without waiting for the data; ranks meet once to learn the lengths."""
        self._require_root(root, "gatherv")
        counts, shape = self._ragged(x, "gatherv")
        if self.rank != root:
            return Work(self._comm.gather_v(x, None, [], root), self._timeout)
        into, finish = self._receive(x, shape, out)
        return Work(self._comm.gather_v(x, into, counts, root), self._timeout, finish)

    def scatterv(
        self,
        x: Any = None,
        counts: Sequence[int] | None = None,
        *,
        root: int = 0,
        out: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Rank r gets the next `counts[r]` rows of root's array.

        Args:
          x: at root, an array of `sum(counts)` rows; elsewhere None.
          counts: at root, rows for each rank, each >= 0; elsewhere None.
          root: the rank, of this group, whose rows are sent.
          out: array of this rank's rows to receive into; without it a new one is returned.
          timeout: seconds, see the class.

        Source: MPI 5.0, section 6.6 (MPI_Scatterv).
        """
        return self._within(timeout).iscatterv(x, counts, root=root, out=out)._wait_blocking(None)

    def iscatterv(
        self, x: Any = None, counts: Sequence[int] | None = None, *, root: int = 0, out: Any = None
    ) -> Work:
        """`scatterv` without waiting for the data; ranks meet once to learn what will come."""

        def checked() -> tuple[int, ...]:
            shape = arrays.info(x).shape
            rows = self._row_counts(counts, shape, "scatterv")
            self._require_fitting(out, arrays.info(x).dtype, (rows[self.rank], *shape[1:]), "scatterv")
            return (*rows, *shape[1:])

        library, dtype, announced = self._announced(x, root, "scatterv", checked)
        rows, rest = announced[: self.size], announced[self.size :]
        into = arrays.new_of(library, dtype, (rows[self.rank], *rest)) if out is None else out
        finish = (lambda: arrays.finish_for(library, into)) if out is None else (lambda: out)
        row = int(np.prod(rest, dtype=np.int64))
        inner = self._comm.scatter_v(x if self.rank == root else None, into, [r * row for r in rows], root)
        return Work(inner, self._timeout, finish)

    def alltoallv(
        self, x: Any, send_counts: Sequence[int], *, out: Any = None, timeout: float | None = None
    ) -> tuple[Any, list[int]]:
        """The first `send_counts[0]` rows of `x` go to rank 0, the next to rank 1, and so on.

        Args:
          x: array of `sum(send_counts)` rows.
          send_counts: rows for each rank, each >= 0.
          out: array of as many rows as will come.
          timeout: seconds, see the class.

        Returns:
          The rows received, in order of rank, and how many came from each.

        Source: MPI 5.0, section 6.8 (MPI_Alltoallv).
        """
        rows, received = self._within(timeout).ialltoallv(x, send_counts, out=out)._wait_blocking(None)
        return rows, received

    def ialltoallv(self, x: Any, send_counts: Sequence[int], *, out: Any = None) -> Work:
        """`alltoallv` without waiting for the data; ranks meet once to learn the lengths."""
        known = arrays.info(x)
        sent = self._row_counts(send_counts, known.shape, "alltoallv")
        table = self.allgather_object((known.dtype, known.shape[1:], sent))
        self._require_same([entry[:2] for entry in table], "alltoallv", "rows of (dtype, shape)")
        received = [entry[2][self.rank] for entry in table]
        into, finish = self._receive(x, (sum(received), *known.shape[1:]), out)
        row = int(np.prod(known.shape[1:], dtype=np.int64))
        inner = self._comm.all_to_all_v(x, [n * row for n in sent], into, [n * row for n in received])
        return Work(inner, self._timeout, lambda: (finish(), received))

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return once every rank of the group has called it. Source: MPI 5.0, section 6.3."""
        self._within(timeout).ibarrier()._wait_blocking(None)

    def ibarrier(self) -> Work:
        """`barrier` without waiting: the Work is done once every rank has entered."""
        return Work(self._comm.barrier(), self._timeout)

    # ---- how long

    def _within(self: _Self, timeout: float | None) -> _Self:
        """This group with another timeout, for all steps of one call."""
        if timeout is None:
            return self
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._timeout = Limit(seconds(timeout))
        return other

    # ---- where results go

    def _place(self, x: Any, out: Any, is_number: bool) -> tuple[Any, Callable[[], Any]]:
        """The array to receive into (None: `x` itself) and what to return, for verbs that keep the shape."""
        if out is not None:
            return out, lambda: out
        if is_number:
            return None, x.item
        if arrays.info(x).writable:
            return None, lambda: x
        into = arrays.new_like(x)
        return into, lambda: arrays.finish(x, into)

    def _receive(self, x: Any, shape: tuple[int, ...], out: Any) -> tuple[Any, Callable[[], Any]]:
        """The array to receive into and what to return, for verbs that change the shape."""
        if out is not None:
            return out, lambda: out
        into = arrays.new_like(x, shape)
        return into, lambda: arrays.finish(x, into)

    def _blocks(self, x: Any, verb: str) -> tuple[int, ...]:
        shape = arrays.info(x).shape
        if not shape or shape[0] != self.size:
            raise InvalidArgumentError(
                f"{verb}: the array must have shape (size, ...) = ({self.size}, ...), got {shape}"
            )
        return shape[1:]

    def _row_counts(self, counts: Sequence[int] | None, shape: tuple[int, ...], verb: str) -> list[int]:
        try:
            rows = [operator.index(n) for n in counts] if counts is not None else []
        except TypeError:
            rows = []
        if len(rows) != self.size or any(n < 0 for n in rows):
            raise InvalidArgumentError(f"{verb}: counts must be {self.size} whole numbers >= 0, got {counts}")
        if not shape or sum(rows) != shape[0]:
            raise InvalidArgumentError(
                f"{verb}: counts {rows} add up to {sum(rows)} rows but the array has shape {shape}"
            )
        return rows

    def _require_fitting(self, out: Any, dtype: str, shape: tuple[int, ...], verb: str) -> None:
        """That `out` can take what will come, where the core does not see both."""
        if out is None:
            return
        given = arrays.info(out)
        if given.dtype != dtype or math.prod(given.shape) != math.prod(shape) or not given.writable:
            writable = "" if given.writable else "read-only "
            raise InvalidArgumentError(
                f"{verb}: out is {writable}{given.dtype}{list(given.shape)}, but {dtype}{list(shape)} will come"
            )

    @staticmethod
    def _rank_number(given: Any, verb: str, what: str) -> int:
        """The number of a rank, a tag or a colour; whether it fits the core says."""
        try:
            return operator.index(given)
        except TypeError:
            raise TypeError(f"{verb}: {what} must be an int, got {given!r}") from None

    def _require_root(self, root: int, verb: str) -> None:
        root = self._rank_number(root, verb, "root")
        if not 0 <= root < self.size:
            raise InvalidArgumentError(
                f"{verb}: root {root} is outside this group's ranks 0..{self.size - 1}"
            )

    def _require_same(self, values: list[Any], verb: str, what: str) -> None:
        if any(value != values[0] for value in values):
            listed = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise MismatchError(f"{verb}: the ranks do not agree on {what}. {listed}")

    def _ragged(self, x: Any, verb: str) -> tuple[list[int], tuple[int, ...]]:
        """Elements of each rank, and the joined shape, of arrays that differ along axis 0."""
        known = arrays.info(x)
        if not known.shape:
            raise InvalidArgumentError(f"{verb}: an array without dimensions has no axis 0 to join along")
        table = self.allgather_object((known.dtype, known.shape))
        self._require_same(
            [(dtype, shape[1:]) for dtype, shape in table], verb, "(dtype, shape without axis 0)"
        )
        row = int(np.prod(known.shape[1:], dtype=np.int64))
        rows = [shape[0] for _, shape in table]
        return [n * row for n in rows], (sum(rows), *known.shape[1:])

    def _announced(
        self, x: Any, root: int, verb: str, shape: Callable[[], tuple[int, ...]]
    ) -> tuple[str, str, tuple[int, ...]]:
        """Root tells the others the library, dtype and shape of what it will send, or why it cannot."""
        self._require_root(root, verb)
        told: Any = None
        failed: Exception | None = None
        if self.rank == root:
            try:
                told = (arrays.library_of(x), arrays.info(x).dtype, shape())
            except (TypeError, ValueError) as error:
                failed, told = error, str(error)
        told = self.bcast_object(told, root=root)
        if failed is not None:
            raise failed
        if isinstance(told, str):
            raise InvalidArgumentError(f"{verb}: root rank {root} cannot send: {told}")
        library, dtype, extents = told
        return library, dtype, tuple(extents)

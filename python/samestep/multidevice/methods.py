"""Collectives on lists of arrays, several per rank, as methods of `Backend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samestep.group.group import Group
from samestep.group.work import CallTimeout, Work, Works
from samestep.multidevice import collectives
from samestep.reduce_ops import Op

__all__ = ["MultiDeviceMethods"]


class MultiDeviceMethods(Group):
    """Collectives with several arrays per rank, for processes with several devices.

    Rules for all of them, in addition to those of the other collectives:

    * All arrays of all ranks have the same dtype and number of elements, and all lists have the same length; otherwise
      every rank raises `MismatchError`.
    * Lists are combined in host memory, wherever their arrays are. Also the non-blocking forms wait for the work that
      is queued in the streams of device arrays, but for no other rank.
    """

    def allreduce_multi(
        self, arrays: Sequence[Any], op: Op = "sum", *, timeout: float | None = None
    ) -> list[Any]:
        """Reduce over all arrays of all ranks, elementwise; every array gets the result.

        Args:
          arrays: list or tuple of arrays.
          op: an operator, see `ReduceOp`; AVG divides by the number of arrays of all ranks.
          timeout: seconds, see `CollectiveMethods`.

        Returns:
          The arrays; a new array of the same library for each that is not writable.

        Raises:
          TypeError, InvalidArgumentError: the arrays or the operator do not fit; nothing was sent.
          MismatchError: on every rank, if the ranks differ in dtype, count, length of the list or op.

        Example:
          >>> import numpy as np, samestep as ss
          >>> backend = ss.initialize()
          >>> backend.allreduce_multi([np.ones(2), np.full(2, 3.0)], "avg")
          [array([2., 2.]), array([2., 2.])]
        """
        limit = self._call_timeout(timeout)
        return self._ended(self._begin_allreduce(arrays, op, limit), limit)

    def iallreduce_multi(self, arrays: Sequence[Any], op: Op = "sum") -> Work[list[Any]]:
        """`allreduce_multi`, non-blocking."""
        limit = self._call_timeout(None)
        return self._work(self._begin_allreduce(arrays, op, limit), limit)

    def _begin_allreduce(
        self, arrays: Sequence[Any], op: Op, limit: CallTimeout
    ) -> collectives.PendingResult:
        listed = collectives.checked(arrays, "allreduce_multi")
        collectives.require_apart(listed)
        with collectives.called(listed):
            return collectives.allreduce(self, listed, op, limit.seconds)

    def reduce_multi(
        self,
        arrays: Sequence[Any],
        op: Op = "sum",
        *,
        root: int = 0,
        root_array: int = 0,
        timeout: float | None = None,
    ) -> list[Any]:
        """Reduce over all arrays of all ranks, elementwise; one array of root gets the result.

        Args:
          arrays: list or tuple of arrays.
          op: an operator, see `ReduceOp`.
          root: the rank, of this group, that gets the result.
          root_array: which of root's arrays gets it; the same on all ranks.
          timeout: seconds; None for the group's timeout.

        Returns:
          The arrays; all but that one are unchanged.
        """
        limit = self._call_timeout(timeout)
        return self._ended(self._begin_reduce(arrays, op, root, root_array, limit), limit)

    def ireduce_multi(
        self, arrays: Sequence[Any], op: Op = "sum", *, root: int = 0, root_array: int = 0
    ) -> Work[list[Any]]:
        """`reduce_multi`, non-blocking."""
        limit = self._call_timeout(None)
        return self._work(self._begin_reduce(arrays, op, root, root_array, limit), limit)

    def _begin_reduce(
        self, arrays: Sequence[Any], op: Op, root: int, root_array: int, limit: CallTimeout
    ) -> collectives.PendingResult:
        listed = collectives.checked(arrays, "reduce_multi")
        self._require_root(root, listed.act)
        collectives.require_index(root_array, listed, "root_array")
        with collectives.called(listed):
            return collectives.reduce(self, listed, op, root, root_array, limit.seconds)

    def bcast_multi(
        self, arrays: Sequence[Any], *, root: int = 0, root_array: int = 0, timeout: float | None = None
    ) -> list[Any]:
        """Broadcast one array of root to all arrays of all ranks.

        Args:
          arrays: list or tuple of arrays.
          root: the rank, of this group, that sends.
          root_array: which of root's arrays it sends; the same on all ranks.
          timeout: seconds; None for the group's timeout.

        Returns:
          The arrays; a new array of the same library for each that is not writable.
        """
        limit = self._call_timeout(timeout)
        return self._ended(self._begin_bcast(arrays, root, root_array, limit), limit)

    def ibcast_multi(self, arrays: Sequence[Any], *, root: int = 0, root_array: int = 0) -> Work[list[Any]]:
        """`bcast_multi`, non-blocking."""
        limit = self._call_timeout(None)
        return self._work(self._begin_bcast(arrays, root, root_array, limit), limit)

    def _begin_bcast(
        self, arrays: Sequence[Any], root: int, root_array: int, limit: CallTimeout
    ) -> collectives.PendingResult:
        listed = collectives.checked(arrays, "bcast_multi")
        collectives.require_apart(listed)
        self._require_root(root, listed.act)
        collectives.require_index(root_array, listed, "root_array")
        with collectives.called(listed):
            return collectives.bcast(self, listed, root, root_array, limit.seconds)

    def allgather_multi(
        self, arrays: Sequence[Any], *, outs: Sequence[Any] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Gather all arrays of all ranks at each device.

        Args:
          arrays: list or tuple of L arrays.
          outs: L arrays with `size * L` times as many elements, for the results; each on the device of `arrays[i]`.
          timeout: seconds; None for the group's timeout.

        Returns:
          `outs`, or new arrays of shape `(size * L, *arrays[i].shape)`. Entry `k * L + j` of each is array j of
          rank k.

        Example:
          >>> import numpy as np, samestep as ss
          >>> backend = ss.initialize()
          >>> backend.allgather_multi([np.array([1, 2]), np.array([3, 4])])[1]
          array([[1, 2],
                 [3, 4]])
        """
        limit = self._call_timeout(timeout)
        return self._ended(self._begin_allgather(arrays, outs, limit), limit)

    def iallgather_multi(
        self, arrays: Sequence[Any], *, outs: Sequence[Any] | None = None
    ) -> Work[list[Any]]:
        """`allgather_multi`, non-blocking."""
        limit = self._call_timeout(None)
        return self._work(self._begin_allgather(arrays, outs, limit), limit)

    def _begin_allgather(
        self, arrays: Sequence[Any], outs: Sequence[Any] | None, limit: CallTimeout
    ) -> collectives.PendingResult:
        listed = collectives.checked(arrays, "allgather_multi")
        receives = collectives.outputs(self, listed, outs)
        with collectives.called(listed):
            return collectives.allgather(self, listed, receives, limit.seconds)

    def _work(self, pending: collectives.PendingResult, limit: CallTimeout) -> Works:
        return Works([pending.work], limit.seconds, pending.finish)

    def _ended(self, pending: collectives.PendingResult, limit: CallTimeout) -> list[Any]:
        """The result after waiting, for what the steps inside the call have left of its time."""
        work, left = self._work(pending, limit), pending.deadline.left()
        result: list[Any] = work._wait_all(left, abandon=True, wait_on_host=limit.wait_on_host)
        return result

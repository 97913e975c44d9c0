"""The verbs on lists of arrays, several on each rank, as methods of `Backend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samestep import lists
from samestep.verbs import CollectiveVerbs
from samestep.work import Limit, Work, Works

__all__ = ["ListVerbs"]


class ListVerbs(CollectiveVerbs):
    """Collectives with several arrays on each rank, for processes that have several devices.

    Rules for all of them, beside those of the other verbs:

    * All arrays of all ranks have one dtype and one number of elements, all lists are of one length; otherwise
      `MismatchError` is raised on every rank.
    * Where NCCL carries the group's device arrays and each array of a list lies on a device of its own, the devices
      of all ranks talk to each other by NCCL, all at once. Ranks meet on the host the first time that a list of
      devices is used, in this order, in this group; afterwards nobody waits on the host.
    * Other lists go through the host: arrays of the host, several on one device, a device that occurs on two ranks,
      groups without NCCL, reductions that NCCL lacks. In a group with NCCL ranks then meet once in each call.
    """

    def allreduce_multi(
        self, arrays: Sequence[Any], op: Any = "sum", *, timeout: float | None = None
    ) -> list[Any]:
        """Reduce over all arrays of all ranks; all of them get the result.

        Args:
          arrays: list or tuple of arrays.
          op: an operator, see `ReduceOp`; AVG divides by the number of arrays of all ranks.
          timeout: seconds, as for all verbs.

        Returns:
          The arrays; new ones of the same library in place of those that cannot be written.

        Raises:
          TypeError, InvalidArgumentError: the arrays or the operator do not fit; nothing has happened.
          MismatchError: ranks disagree (on every rank).

        Example:
          >>> import numpy as np, samestep as ss
          >>> backend = ss.initialize()
          >>> backend.allreduce_multi([np.ones(2), np.full(2, 3.0)], "avg")
          [array([2., 2.]), array([2., 2.])]
        """
        of = self._within(timeout)
        result: list[Any] = of._ended(of._begin_allreduce(arrays, op))
        return result

    def iallreduce_multi(self, arrays: Sequence[Any], op: Any = "sum") -> Work:
        """`allreduce_multi` without waiting.

        In a group with NCCL a list that goes through the host, and the first use of a list of devices, meets the other
        ranks inside the call: it has no place between a send and its recv.
        """
        return self._work(self._begin_allreduce(arrays, op))

    def _begin_allreduce(self, arrays: Sequence[Any], op: Any) -> lists.Begun:
        return lists.allreduce(self, lists.checked(arrays, "allreduce_multi"), op)

    def reduce_multi(
        self,
        arrays: Sequence[Any],
        op: Any = "sum",
        *,
        root: int = 0,
        root_array: int = 0,
        timeout: float | None = None,
    ) -> list[Any]:
        """Reduce over all arrays of all ranks; one array of root gets the result.

        Args:
          arrays: list or tuple of arrays.
          op: an operator, see `ReduceOp`.
          root: the rank, of this group, that gets the result.
          root_array: which of root's arrays gets it; the same on all ranks.
          timeout: seconds, as for all verbs.

        Returns:
          The arrays; all but the one keep their elements.
        """
        of = self._within(timeout)
        result: list[Any] = of._ended(of._begin_reduce(arrays, op, root, root_array))
        return result

    def ireduce_multi(
        self, arrays: Sequence[Any], op: Any = "sum", *, root: int = 0, root_array: int = 0
    ) -> Work:
        """`reduce_multi` without waiting.

        In a group with NCCL a list that goes through the host, and the first use of a list of devices, meets the other
        ranks inside the call: it has no place between a send and its recv.
        """
        return self._work(self._begin_reduce(arrays, op, root, root_array))

    def _begin_reduce(self, arrays: Sequence[Any], op: Any, root: int, root_array: int) -> lists.Begun:
        listed = lists.checked(arrays, "reduce_multi")
        self._require_root(root, listed.act)
        lists.require_index(root_array, listed, "root_array")
        return lists.reduce(self, listed, op, root, root_array)

    def bcast_multi(
        self, arrays: Sequence[Any], *, root: int = 0, root_array: int = 0, timeout: float | None = None
    ) -> list[Any]:
        """Give all arrays of all ranks the elements of one array of root.

        Args:
          arrays: list or tuple of arrays.
          root: the rank, of this group, that sends.
          root_array: which of root's arrays it sends; the same on all ranks.
          timeout: seconds, as for all verbs.

        Returns:
          The arrays; new ones of the same library in place of those that cannot be written.
        """
        of = self._within(timeout)
        result: list[Any] = of._ended(of._begin_bcast(arrays, root, root_array))
        return result

    def ibcast_multi(self, arrays: Sequence[Any], *, root: int = 0, root_array: int = 0) -> Work:
        """`bcast_multi` without waiting.

        In a group with NCCL a list that goes through the host, and the first use of a list of devices, meets the other
        ranks inside the call: it has no place between a send and its recv.
        """
        return self._work(self._begin_bcast(arrays, root, root_array))

    def _begin_bcast(self, arrays: Sequence[Any], root: int, root_array: int) -> lists.Begun:
        listed = lists.checked(arrays, "bcast_multi")
        self._require_root(root, listed.act)
        lists.require_index(root_array, listed, "root_array")
        return lists.bcast(self, listed, root, root_array)

    def allgather_multi(
        self, arrays: Sequence[Any], *, outs: Sequence[Any] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Every array of every rank goes to each device of each rank.

        Args:
          arrays: list or tuple of L arrays.
          outs: L arrays of `size * L` times as many elements to receive into, `outs[i]` where `arrays[i]` is.
          timeout: seconds, as for all verbs.

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
        of = self._within(timeout)
        result: list[Any] = of._ended(of._begin_allgather(arrays, outs))
        return result

    def iallgather_multi(self, arrays: Sequence[Any], *, outs: Sequence[Any] | None = None) -> Work:
        """`allgather_multi` without waiting.

        In a group with NCCL a list that goes through the host, and the first use of a list of devices, meets the other
        ranks inside the call: it has no place between a send and its recv.
        """
        return self._work(self._begin_allgather(arrays, outs))

    def _begin_allgather(self, arrays: Sequence[Any], outs: Sequence[Any] | None) -> lists.Begun:
        listed = lists.checked(arrays, "allgather_multi")
        receives = lists.receiving(self, listed, outs)
        return lists.allgather(self, listed, receives)

    def _work(self, begun: lists.Begun) -> Works:
        return Works(begun.works, self._timeout, begun.finish)

    def _ended(self, begun: lists.Begun) -> Any:
        """The result after waiting, for what the steps inside the call have left of its time."""
        on_host = type(self._timeout) is Limit
        return self._work(begun)._wait_all(begun.deadline.left(), abandon=True, on_host=on_host)

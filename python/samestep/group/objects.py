"""Point-to-point messages, and operations on Python objects, as methods of `Backend`."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from samestep import _core, arrays
from samestep._util.text import error_line, ranks_text
from samestep.arrays.pickling import dumps
from samestep.errors import InvalidArgumentError
from samestep.group import trust
from samestep.group.method_support import MethodSupport
from samestep.group.work import GIVEN_BACK, NOTHING, Status, Work, Works, go_on

ANY = -1
"""Any source, or any tag."""

_NO_STATUS = Status(-1, -1, 0)
_T = TypeVar("_T")
_NO_BYTES = np.empty(0, np.uint8)
_core.set_status_type(Status)


class _SendRecvWork(Works):
    """A send and a receive, in this order: the send completes also if the message does not fit its receive."""

    __slots__ = ()

    def _leave(self) -> None:
        sent, received = self._all
        if received.give_back():
            self._all = (sent, GIVEN_BACK)
            go_on(received)
        go_on(self)


def wait_or_cancel(receive: Work[_T], limit: float | None = None) -> _T:
    """The result of a receive; one that is given up is cancelled. `limit`: seconds, None for the group's."""
    if limit is not None:
        receive._timeout = limit  # also of `__del__`, for a message that had begun to arrive
    try:
        return receive.wait(receive._timeout)
    except BaseException:
        receive._inner.cancel()
        raise


def _pickled(obj: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(dumps(obj), np.uint8)


def _pickled_or_why(obj: Any) -> tuple[np.ndarray[Any, Any], list[Exception]]:
    """The pickled object and []; if pickling fails, the error's text and a list that holds the error.

    The text is sent to the other ranks, which would otherwise wait. The list lets the caller drop its reference to the
    error, whose traceback would keep the object alive.
    """
    try:
        return _pickled(obj), []
    except Exception as error:
        return np.frombuffer(error_line(error).encode(), np.uint8), [error]


def _refused(verb: str, root: int, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{verb}: root rank {root} cannot pickle its object: {why}")


def _raise_not_pickled(verb: str, failed: list[Exception]) -> NoReturn:
    """The error for the rank whose object could not be pickled. Takes it out of the list; see `_pickled_or_why`."""
    error = failed.pop()
    if isinstance(error, MemoryError):  # it says nothing about the object
        raise error
    raise InvalidArgumentError(f"{verb}: the object cannot be pickled: {error_line(error)}") from error


class MessageMethods(MethodSupport):
    """Messages between two ranks, and collectives on objects.

    Messages from one sender with one tag arrive in the order in which they were sent, and match receives in the order
    in which these were posted. A message that does not fit its receive (another dtype, too many elements, an object
    where an array is received, or vice versa) raises `MismatchError` in the receiver; it is consumed, and the next
    receive gets the next message. Objects are pickled: receive them only from ranks you trust.

    `None` in place of a rank means no rank (`MPI.PROC_NULL`), as at the ends of a chain: nothing is sent or received,
    and the status of the receive is `Status(-1, -1, 0)`.
    """

    _trusted: bool
    """Whether all ranks have proved that they belong to the job."""

    @_core.fast_method
    def send(self, x: Any, dest: int | None, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send an array; returns when `x` may be written again.

        Args:
          x: array of any shape and layout.
          dest: rank of this group; None for no rank.
          tag: 0 <= tag < 2**31; receives select messages by tag.
          timeout: seconds; None for the group's timeout. A timeout ends the group, because a partly sent message
            cannot be cancelled.

        Source: MPI 5.0, section 3.2 (MPI_Send).
        """
        limit = self._checked(timeout)
        self.isend(x, dest, tag)._wait_blocking(limit)

    def isend(self, x: Any, dest: int | None, tag: int = 0) -> Work[None]:
        """Non-blocking `send`; do not change `x` until the Work is done."""
        x, _ = arrays.readable(x, "send")
        tag = self._tag_number(tag, "send")
        if dest is None:
            return self._completed(None)
        return Work(self._comm.send(x, self._rank_number(dest, "send", "dest"), tag), self._timeout)

    @_core.fast_method
    def recv(
        self, out: Any, source: int | None = ANY, tag: int = ANY, *, timeout: float | None = None
    ) -> Status:
        """Receive the next message into `out`.

        Args:
          out: writable array with the dtype of the message and room for its elements. A shorter message fills the
            first elements, in C order, and leaves the others; the status has the count.
          source: rank of this group, or ANY; None for no rank.
          tag: the tag of the message, or ANY.
          timeout: seconds; None for the group's timeout. A timeout cancels the receive, unless its message has
            begun to arrive; the group stays usable.

        Returns:
          The source, tag and number of elements of the message.

        Source: MPI 5.0, section 3.2 (MPI_Recv).
        """
        limit = self._checked(timeout)
        return wait_or_cancel(self.irecv(out, source, tag), limit)

    def irecv(self, out: Any, source: int | None = ANY, tag: int = ANY) -> Work[Status]:
        """Non-blocking `recv`; the result of the Work is the Status."""
        tag = self._tag_number(tag, "recv", or_any=True)
        if source is None:
            return self._completed(_NO_STATUS)
        inner = self._comm.recv(out, self._rank_number(source, "recv", "source"), tag, exactly=False)
        return Work(inner, self._timeout, lambda: _status(inner))

    def probe(self, source: int | None = ANY, tag: int = ANY, *, timeout: float | None = None) -> Status:
        """Wait until a matching message has arrived, without receiving it.

        Args:
          source: as for `recv`.
          tag: as for `recv`.
          timeout: seconds; None for the group's timeout. The group stays usable after a timeout.

        Returns:
          The status of the message; its count is elements of an array, or bytes of a pickled object.

        Source: MPI 5.0, section 3.8.1 (MPI_Probe).

        Example:
          >>> import numpy as np, samestep as ss
          >>> backend = ss.initialize()
          >>> backend.send(np.arange(3), dest=0)
          >>> out = np.empty(backend.probe().count, int)
          >>> backend.recv(out).count, out
          (3, array([0, 1, 2]))
        """
        limit = self._checked(timeout)
        return wait_or_cancel(self._probe(source, tag), limit)

    def iprobe(self, source: int | None = ANY, tag: int = ANY) -> Status | None:
        """The status of a matching message; None if none has arrived. Never blocks."""
        work = self._probe(source, tag)
        if work.done():
            return work.wait()
        work._inner.cancel()
        return None

    def _probe(self, source: int | None, tag: int) -> Work[Status]:
        tag = self._tag_number(tag, "probe", or_any=True)
        if source is None:
            return self._completed(_NO_STATUS)
        inner = self._comm.probe(self._rank_number(source, "probe", "source"), tag)
        return Work(inner, self._timeout, lambda: _status(inner))

    def _completed(self, result: _T) -> Work[_T]:
        """What stands for an operation if source or dest is None."""
        return Work(NOTHING, self._timeout, lambda: result)

    @_core.fast_method
    def sendrecv(
        self,
        x: Any,
        dest: int | None,
        out: Any,
        source: int | None = ANY,
        *,
        sendtag: int = 0,
        recvtag: int = ANY,
        timeout: float | None = None,
    ) -> Status:
        """Send `x` to `dest` and receive into `out` at the same time, which avoids deadlock in rings.

        Args: as for `send` and `recv`.

        Source: MPI 5.0, section 3.10 (MPI_Sendrecv).

        Example: exchange of ghost cells along a chain of ranks.
          >>> import numpy as np, samestep as ss
          >>> backend = ss.initialize()
          >>> right = backend.rank + 1 if backend.rank + 1 < backend.size else None
          >>> left = backend.rank - 1 if backend.rank > 0 else None
          >>> cells = np.zeros(5)
          >>> backend.sendrecv(cells[-1:], right, cells[:1], left).count
          0
        """
        limit = self._checked(timeout)
        both = self.isendrecv(x, dest, out, source, sendtag=sendtag, recvtag=recvtag)
        return both._wait_blocking(limit)

    def isendrecv(
        self,
        x: Any,
        dest: int | None,
        out: Any,
        source: int | None = ANY,
        *,
        sendtag: int = 0,
        recvtag: int = ANY,
    ) -> Work[Status]:
        """Non-blocking `sendrecv`; the result of the Work is the Status of the received message."""
        x, _ = arrays.readable(x, "sendrecv")
        x = arrays.copy_if_overlapping(x, out, "sendrecv")
        received = self.irecv(out, source, recvtag)
        try:
            sent = self.isend(x, dest, sendtag)
        except Exception:
            received._inner.cancel()
            raise
        both = _SendRecvWork((sent._inner, received._inner), self._timeout, received._finish)
        sent._detach()
        received._detach()
        return both

    # ---- objects

    def _require_trust(self, verb: str) -> None:
        if not self._trusted:
            raise trust.refuse_objects(verb)

    def bcast_object(self, obj: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """Broadcast a picklable object from root. At root the object itself is returned."""
        limit = self._checked(timeout)
        return self._start_bcast_object(obj, root, limit)._wait_blocking(limit)

    def ibcast_object(self, obj: Any = None, root: int = 0) -> Work[Any]:
        """Non-blocking `bcast_object`; the call itself waits once, for the size."""
        return self._start_bcast_object(obj, root, None)

    def _start_bcast_object(self, obj: Any, root: int, limit: float | None) -> Work[Any]:
        self._require_trust("bcast_object")
        self._require_root(root, "bcast_object")
        data, failed = _pickled_or_why(obj) if self.rank == root else (_NO_BYTES, [])
        # Negative: the size of an error text.
        size = np.array([-data.size if failed else data.size], np.int64)
        with _core.UserCall(f"bcast_object(root={root})"):
            self._comm.bcast(size, root).wait(self._within(limit), True)
            if self.rank != root:
                data = np.empty(abs(int(size[0])), np.uint8)
            inner = self._comm.bcast(data, root)
            if size[0] < 0:
                inner.wait(self._within(limit), True)
                if failed:
                    _raise_not_pickled("bcast_object", failed)
                raise _refused("bcast_object", root, data.tobytes().decode())
        return Work(inner, self._timeout, lambda: obj if self.rank == root else pickle.loads(data.data))

    def allgather_object(self, obj: _T, *, timeout: float | None = None) -> list[_T]:
        """Gather picklable objects; every rank gets the list of all ranks' objects, in rank order."""
        limit = self._checked(timeout)
        return self._start_allgather_object(obj, limit)._wait_blocking(limit)

    def iallgather_object(self, obj: _T) -> Work[list[_T]]:
        """Non-blocking `allgather_object`; the call itself waits once, for the sizes."""
        return self._start_allgather_object(obj, None)

    def _start_allgather_object(self, obj: _T, limit: float | None) -> Work[list[_T]]:
        self._require_trust("allgather_object")
        with _core.UserCall("allgather_object"):
            data, counts = self._exchange_sizes(obj, "allgather_object", limit)
            into = np.empty(sum(counts), np.uint8)
            inner = self._comm.allgatherv(data, into, counts)
        return Work(inner, self._timeout, lambda: _unpickle_each(into, counts))

    def gather_object(self, obj: _T, root: int = 0, *, timeout: float | None = None) -> list[_T] | None:
        """Gather picklable objects; root gets the list in rank order, the others get None."""
        limit = self._checked(timeout)
        return self._start_gather_object(obj, root, limit)._wait_blocking(limit)

    def igather_object(self, obj: _T, root: int = 0) -> Work[list[_T] | None]:
        """Non-blocking `gather_object`; the call itself waits once, for the sizes."""
        return self._start_gather_object(obj, root, None)

    def _start_gather_object(self, obj: _T, root: int, limit: float | None) -> Work[list[_T] | None]:
        self._require_trust("gather_object")
        self._require_root(root, "gather_object")
        with _core.UserCall(f"gather_object(root={root})"):
            data, counts = self._exchange_sizes(obj, "gather_object", limit)
            if self.rank != root:
                return Work(self._comm.gatherv(data, None, [], root), self._timeout)
            into = np.empty(sum(counts), np.uint8)
            inner = self._comm.gatherv(data, into, counts, root)
        return Work(inner, self._timeout, lambda: _unpickle_each(into, counts))

    def scatter_object(
        self, objects: Sequence[Any] | None = None, root: int = 0, *, timeout: float | None = None
    ) -> Any:
        """Scatter picklable objects: rank r gets `objects[r]` of root's list. Other ranks pass None."""
        limit = self._checked(timeout)
        return self._start_scatter_object(objects, root, limit)._wait_blocking(limit)

    def iscatter_object(self, objects: Sequence[Any] | None = None, root: int = 0) -> Work[Any]:
        """Non-blocking `scatter_object`; the call itself waits once, for the sizes."""
        return self._start_scatter_object(objects, root, None)

    def _start_scatter_object(
        self, objects: Sequence[Any] | None, root: int, limit: float | None
    ) -> Work[Any]:
        self._require_trust("scatter_object")
        self._require_root(root, "scatter_object")
        metadata: Any = None
        parts: list[np.ndarray[Any, Any]] = []
        failed: list[Exception] = []
        if self.rank == root:
            if objects is None or not _has_order(objects) or len(objects) != self.size:
                metadata = f"scatter_object: root must give a list of {self.size} objects, one for each rank"
            else:
                try:
                    parts = [_pickled(obj) for obj in objects]
                    metadata = [part.size for part in parts]
                except Exception as error:
                    failed, metadata = [error], str(_refused("scatter_object", root, error_line(error)))
        with _core.UserCall(f"scatter_object(root={root})"):
            counts = self._start_bcast_object(metadata, root, limit)._wait_blocking(limit)
            if isinstance(counts, str):
                if failed:
                    _raise_not_pickled("scatter_object", failed)
                raise InvalidArgumentError(counts)
            into = np.empty(counts[self.rank], np.uint8)
            data = np.concatenate(parts) if parts else None
            inner = self._comm.scatterv(data, into, counts, root)
        return Work(inner, self._timeout, lambda: pickle.loads(into.data))

    def _exchange_sizes(
        self, obj: Any, verb: str, limit: float | None
    ) -> tuple[np.ndarray[Any, Any], list[int]]:
        """The pickled object, and the sizes of all ranks' pickled objects. Collective."""
        data, failed = _pickled_or_why(obj)
        sizes = np.empty(self.size, np.int64)
        self._comm.allgather(np.array(-1 if failed else data.size, np.int64), sizes).wait(
            self._within(limit), True
        )
        if failed:
            _raise_not_pickled(verb, failed)
        unable = np.flatnonzero(sizes < 0)
        if unable.size:
            raise InvalidArgumentError(
                f"{verb}: {ranks_text(unable.tolist())} cannot pickle what was given there"
            )
        return data, [int(n) for n in sizes]

    def send_object(self, obj: Any, dest: int | None, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send an object of any size to one rank, which receives it with `recv_object`; to None: to nobody."""
        limit = self._checked(timeout)
        self.isend_object(obj, dest, tag)._wait_blocking(limit)

    def isend_object(self, obj: Any, dest: int | None, tag: int = 0) -> Work[None]:
        """Non-blocking `send_object`; the object is pickled during the call."""
        self._require_trust("send_object")
        data, failed = _pickled_or_why(obj)
        if failed:
            _raise_not_pickled("send_object", failed)
        tag = self._tag_number(tag, "send_object")
        if dest is None:
            return self._completed(None)
        dest = self._rank_number(dest, "send_object", "dest")
        return Work(self._comm.send_object(data, dest, tag), self._timeout)

    def recv_object(self, source: int | None = ANY, tag: int = ANY, *, timeout: float | None = None) -> Any:
        """Receive the next object that was sent with `send_object`. If `source` is None, returns None."""
        limit = self._checked(timeout)
        return wait_or_cancel(self.irecv_object(source, tag), limit)

    def irecv_object(self, source: int | None = ANY, tag: int = ANY) -> Work[Any]:
        """Non-blocking `recv_object`; the result of the Work is the object."""
        self._require_trust("recv_object")
        tag = self._tag_number(tag, "recv_object", or_any=True)
        if source is None:
            return self._completed(None)
        inner = self._comm.recv_object(self._rank_number(source, "recv_object", "source"), tag)
        return Work(inner, self._timeout, lambda: pickle.loads(inner.object()))


def _has_order(objects: Any) -> bool:
    """Whether these are objects one after another, as those in a set, a dict or a text are not meant to be."""
    return hasattr(objects, "__getitem__") and not isinstance(objects, (str, bytes, Mapping))


def _status(inner: _core.Work) -> Status:
    status = inner.status()
    return Status(status.source, status.tag, status.count)


def _unpickle_each(data: np.ndarray[Any, Any], counts: list[int]) -> list[Any]:
    ends = np.cumsum(counts)
    return [pickle.loads(data[end - n : end].data) for n, end in zip(counts, ends, strict=True)]

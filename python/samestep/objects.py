"""Point to point, and the verbs on Python objects, as methods of `Backend`."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from samestep import _core, arrays
from samestep.errors import InvalidArgumentError, MismatchError
from samestep.verbs import CollectiveVerbs
from samestep.work import Deadline, Status, Work

__all__ = ["ANY", "MessageVerbs"]

ANY = -1
"""Any source, or any tag."""


class _Chain(Work):
    """A receive in two steps: the second is started when the first has ended."""

    __slots__ = ("_next", "_second")

    def __init__(self, first: _core.Work, timeout: float, then: Callable[[], Work]) -> None:
        super().__init__(first, timeout)
        self._next: Callable[[], Work] = then
        self._second: Work | None = None

    def _advance(self) -> Work | None:
        if self._second is None and self._inner.done() and self._inner.exception() is None:
            self._second = self._next()
        return self._second

    def done(self) -> bool:
        second = self._advance()
        return second.done() if second is not None else self._inner.done()

    def wait(self, timeout: float | None = None, *, host: bool = False) -> Any:
        self._inner.wait(self._timeout if timeout is None else float(timeout), False)
        second = self._advance()
        assert second is not None
        return second.wait(timeout, host=host)

    def exception(self) -> BaseException | None:
        return self._second.exception() if self._second is not None else super().exception()

    def _wait_blocking(self, timeout: float | None) -> Any:
        return self.wait(timeout)

    def __del__(self) -> None:
        super().__del__()
        with contextlib.suppress(Exception):  # the first step has failed, or is none of this process
            self._advance()  # what it starts is dropped in its turn


class _Both(Work):
    """A send and a receive that end together; the result is the receive's."""

    __slots__ = ("_received", "_sent")

    def __init__(self, sent: Work, received: Work) -> None:
        super().__init__(received._inner, received._timeout, received._finish)
        self._sent = sent
        self._received = received  # a Work that is dropped would be waited for

    def done(self) -> bool:
        return self._sent.done() and super().done()

    def wait(self, timeout: float | None = None, *, host: bool = False) -> Any:
        result = super().wait(timeout, host=host)
        self._sent.wait(timeout, host=host)
        return result

    def exception(self) -> BaseException | None:
        return self._sent.exception() or super().exception()

    def _wait_blocking(self, timeout: float | None) -> Any:
        try:
            try:
                result = super()._wait_blocking(timeout)
            except MismatchError:  # of what was received: the group goes on, and so does what was sent
                self._sent._wait_blocking(timeout)
                raise
            self._sent._wait_blocking(timeout)
        except BaseException:
            self._sent._leave()
            self._received._leave()
            raise
        return result


def _wait_or_take_back(receive: Work) -> Any:
    try:
        return receive.wait(receive._timeout)
    except BaseException:
        receive._inner.cancel()
        raise


def _pickled(obj: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)


class MessageVerbs(CollectiveVerbs):
    """Messages between two ranks, and collectives on objects.

    Messages of one sender with one tag arrive in the order they were sent, and are received in the order
    the receives were posted. A message of other dtype or count than the receive is a `MismatchError` in the
    receiver; the message is consumed. Objects travel by pickle: receive them only from ranks you trust.
    """

    def send(self, x: Any, dest: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send an array; returns once `x` may be written again.

        Args:
          x: array of any layout.
          dest: rank of this group.
          tag: 0 <= tag < 2**31; a receive chooses by it.
          timeout: seconds, else the group's. Running out of it ends the group: what was sent in part cannot
            be taken back.

        Source: MPI 5.0, section 3.2 (MPI_Send).
        """
        self._within(timeout).isend(x, dest, tag)._wait_blocking(None)

    def isend(self, x: Any, dest: int, tag: int = 0) -> Work:
        """`send` without waiting; `x` must stay as it is until the Work is done."""
        x, _ = arrays.readable(x, "send")
        dest, tag = self._rank_number(dest, "send", "dest"), self._rank_number(tag, "send", "tag")
        return Work(self._comm.send(x, dest, tag), self._timeout)

    def recv(self, out: Any, source: int = ANY, tag: int = ANY, *, timeout: float | None = None) -> Status:
        """Receive the next message into `out`.

        Args:
          out: writable array with the dtype and count of the message.
          source: rank of this group, or ANY.
          tag: the tag it was sent with, or ANY.
          timeout: seconds, else the group's. Running out of it takes the receive back; the group stays usable.

        Returns:
          Who sent it, with which tag, and how many elements.

        Source: MPI 5.0, section 3.2 (MPI_Recv).
        """
        status: Status = _wait_or_take_back(self._within(timeout).irecv(out, source, tag))
        return status

    def irecv(self, out: Any, source: int = ANY, tag: int = ANY) -> Work:
        """`recv` without waiting; the Work's result is the Status."""
        source, tag = self._rank_number(source, "recv", "source"), self._rank_number(tag, "recv", "tag")
        inner = self._comm.recv(out, source, tag)
        return Work(inner, self._timeout, lambda: _status(inner))

    def sendrecv(
        self,
        x: Any,
        dest: int,
        out: Any,
        source: int = ANY,
        *,
        sendtag: int = 0,
        recvtag: int = ANY,
        timeout: float | None = None,
    ) -> Status:
        """Send `x` to `dest` and receive into `out` at the same time, so that rings do not lock up.

        Source: MPI 5.0, section 3.10 (MPI_Sendrecv).
        """
        both = self._within(timeout).isendrecv(x, dest, out, source, sendtag=sendtag, recvtag=recvtag)
        status: Status = both._wait_blocking(None)
        return status

    def isendrecv(
        self, x: Any, dest: int, out: Any, source: int = ANY, *, sendtag: int = 0, recvtag: int = ANY
    ) -> Work:
        """`sendrecv` without waiting; the Work's result is the Status of what was received."""
        x, _ = arrays.readable(x, "send")
        x = arrays.apart(x, out)
        received = self.irecv(out, source, recvtag)
        try:
            return _Both(self.isend(x, dest, sendtag), received)
        except Exception:
            received._inner.cancel()
            raise

    # ---- objects

    def bcast_object(self, obj: Any = None, *, root: int = 0, timeout: float | None = None) -> Any:
        """Every rank gets root's object; root gets the very object back."""
        return self._within(timeout).ibcast_object(obj, root=root)._wait_blocking(None)

    def ibcast_object(self, obj: Any = None, *, root: int = 0) -> Work:
        """`bcast_object` without waiting for the object; ranks meet once to learn its size."""
        self._require_root(root, "bcast_object")
        data = _pickled(obj) if self.rank == root else None
        size = np.array([0 if data is None else data.size], np.int64)
        self._comm.broadcast(size, root).wait(self._timeout, True)
        if data is not None:
            return Work(self._comm.broadcast(data, root), self._timeout, lambda: obj)
        into = np.empty(int(size[0]), np.uint8)
        return Work(self._comm.broadcast(into, root), self._timeout, lambda: pickle.loads(into.data))

    def allgather_object(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """Every rank gets the list of all ranks' objects, in order of rank."""
        objects: list[Any] = self._within(timeout).iallgather_object(obj)._wait_blocking(None)
        return objects

    def iallgather_object(self, obj: Any) -> Work:
        """`allgather_object` without waiting for the objects; ranks meet once to learn their sizes."""
        data, counts = self._sizes(obj)
        into = np.empty(sum(counts), np.uint8)
        inner = self._comm.all_gather_v(data, into, counts)
        return Work(inner, self._timeout, lambda: _unpickle_each(into, counts))

    def gather_object(self, obj: Any, *, root: int = 0, timeout: float | None = None) -> list[Any] | None:
        """Root gets the list of all ranks' objects; the others None."""
        objects: list[Any] | None = self._within(timeout).igather_object(obj, root=root)._wait_blocking(None)
        return objects

    def igather_object(self, obj: Any, *, root: int = 0) -> Work:
        """`gather_object` without waiting for the objects; ranks meet once to learn their sizes."""
        self._require_root(root, "gather_object")
        data, counts = self._sizes(obj)
        if self.rank != root:
            return Work(self._comm.gather_v(data, None, [], root), self._timeout)
        into = np.empty(sum(counts), np.uint8)
        inner = self._comm.gather_v(data, into, counts, root)
        return Work(inner, self._timeout, lambda: _unpickle_each(into, counts))

    def scatter_object(
        self, objects: Sequence[Any] | None = None, *, root: int = 0, timeout: float | None = None
    ) -> Any:
        """Rank r gets `objects[r]` of root's list; the others pass None."""
        return self._within(timeout).iscatter_object(objects, root=root)._wait_blocking(None)

    def iscatter_object(self, objects: Sequence[Any] | None = None, *, root: int = 0) -> Work:
        """`scatter_object` without waiting for the objects; ranks meet once to learn their sizes."""
        self._require_root(root, "scatter_object")
        told: Any = None
        parts: list[np.ndarray[Any, Any]] = []
        if self.rank == root:
            if objects is None or len(objects) != self.size:
                told = f"scatter_object: root must give a list of {self.size} objects, one for each rank"
            else:
                parts = [_pickled(obj) for obj in objects]
                told = [part.size for part in parts]
        counts = self.bcast_object(told, root=root)
        if isinstance(counts, str):
            raise InvalidArgumentError(counts)
        into = np.empty(counts[self.rank], np.uint8)
        data = np.concatenate(parts) if parts else None
        inner = self._comm.scatter_v(data, into, counts, root)
        return Work(inner, self._timeout, lambda: pickle.loads(into.data))

    def send_object(self, obj: Any, dest: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send an object of any size to one rank, which receives it with `recv_object`."""
        self._within(timeout).isend_object(obj, dest, tag)._wait_blocking(None)

    def isend_object(self, obj: Any, dest: int, tag: int = 0) -> Work:
        """`send_object` without waiting; the object is taken as it is now."""
        data = _pickled(obj)
        size = self._comm.send(np.array([data.size], np.int64), dest, tag)
        return _Both(Work(size, self._timeout), Work(self._comm.send(data, dest, tag), self._timeout))

    def recv_object(self, source: int = ANY, tag: int = ANY, *, timeout: float | None = None) -> Any:
        """Receive the next object that was sent with `send_object`."""
        return _wait_or_take_back(self._within(timeout).irecv_object(source, tag))

    def irecv_object(self, source: int = ANY, tag: int = ANY) -> Work:
        """`recv_object` without waiting; the Work's result is the object.

        It arrives in two messages: while one is outstanding, post no other receive of the same source and tag.
        """
        size = np.empty(1, np.int64)
        first = self._comm.recv(size, source, tag)

        def then() -> Work:
            status = first.status()
            into = np.empty(int(size[0]), np.uint8)
            inner = self._comm.recv(into, status.source, status.tag)
            return Work(inner, self._timeout, lambda: pickle.loads(into.data))

        return _Chain(first, self._timeout, then)

    def _sizes(self, obj: Any) -> tuple[np.ndarray[Any, Any], list[int]]:
        """The pickled object, and the sizes of all ranks'."""
        return exchange_sizes(self._comm, obj, self._timeout)


def exchange_sizes(
    comm: _core.Communicator, obj: Any, timeout: float
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """The pickled object, and the sizes of all ranks' pickled objects. Collective."""
    data = _pickled(obj)
    sizes = np.empty(comm.size, np.int64)
    comm.all_gather(np.array(data.size, np.int64), sizes).wait(timeout, True)
    return data, [int(n) for n in sizes]


def exchange_objects(comm: _core.Communicator, obj: Any, timeout: float) -> list[Any]:
    """All ranks' objects, in order of rank. Collective."""
    deadline = Deadline(timeout)
    data, counts = exchange_sizes(comm, obj, timeout)
    into = np.empty(sum(counts), np.uint8)
    comm.all_gather_v(data, into, counts).wait(deadline.left(), True)
    return _unpickle_each(into, counts)


def _status(inner: _core.Work) -> Status:
    status = inner.status()
    return Status(status.source, status.tag, status.count)


def _unpickle_each(data: np.ndarray[Any, Any], counts: list[int]) -> list[Any]:
    ends = np.cumsum(counts)
    return [pickle.loads(data[end - n : end].data) for n, end in zip(counts, ends, strict=True)]

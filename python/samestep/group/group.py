"""A group of ranks: its members and hosts, its subgroups, and its end."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import numpy as np

from samestep import _core, arrays
from samestep._util.deadline import seconds
from samestep._util.text import error_line
from samestep.arrays import numpy_memory
from samestep.errors import PeerLostError
from samestep.group import compiled, hosts, other_names
from samestep.group.collectives import CollectiveMethods
from samestep.group.objects import MessageMethods
from samestep.group.variable_length import VariableLengthMethods
from samestep.group.work import Work

_Self = TypeVar("_Self", bound="Group")
_LARGE = 64 << 20  # bytes of an array: of a smaller one memory is not asked whether it fits


class Group(CollectiveMethods, MessageMethods, VariableLengthMethods):
    """A group of ranks with operations on arrays and objects; `samestep.Backend` adds trees and lists of arrays."""

    kind: ClassVar[str] = ""
    """"mpi", "nccl" or "native": the name that `initialize` takes."""

    def __new__(cls: type[_Self], *args: Any, **_: Any) -> _Self:
        """Create a group; for the package only.

        Raises:
          TypeError: a user calls the class; the text says what to call instead.
        """
        if not args or not isinstance(args[0], _core.Communicator):
            known = f"samestep.{cls.__name__}" if cls.kind else ""
            raise TypeError(
                f"{cls.__name__} is not called: pass the class itself, samestep.initialize({known}), "
                "which returns the backend"
            )
        return super().__new__(cls)

    def __init__(
        self,
        comm: _core.Communicator,
        *,
        timeout: float,
        device: int | None = None,
        world_hosts: list[str],
        bootstrap_comm: _core.Communicator | None = None,
        trusted: bool = True,
    ) -> None:
        self._comm = comm
        self._pid = os.getpid()
        self._at_end: Callable[[], None] = lambda: None  # see `_call_at_end`
        self._bootstrap_comm = bootstrap_comm  # the communicator that `comm` was created from, if any
        # All ranks have proved that they belong to the job: their objects may be unpickled.
        self._trusted = trusted
        self._timeout = timeout
        self._device = device
        self._hosts = world_hosts  # by rank of this group
        self._placement = hosts.locate(world_hosts, comm.rank)
        self._parent: weakref.ref[Group] | None = None
        self._children: list[Group] = []  # those that are open
        self._node_and_cross: tuple[Group, Group] | None = None
        self._closed = False
        self._ending = threading.Lock()  # guards `_closed`; held briefly
        # For `together()`:
        self._control: _core.Communicator | None = None  # the same ranks; used at the ends of blocks only
        self._members: list[int] | None = None  # as ranks of the parent; None: not made by split or group
        self._n_blocks = 0  # entered so far
        self._ending_depth: int | None = None  # of the nested block that all ranks have agreed to end
        self._replaced = 0  # blocks that an exception has ended, and losses that the group has survived
        self._regroup: Callable[..., None] | None = None  # of the world of a job that goes on after a loss
        # Methods that are called after a loss, by their objects.
        self._changed: weakref.WeakKeyDictionary[Any, Callable[..., None]] = weakref.WeakKeyDictionary()
        self._cache: dict[str, Any] = {}  # used by higher layers; lives as long as this group

    # ---- members and hosts

    @property
    def name(self) -> str:
        """Name of the group in error messages: "world", "world/split 0 color 1", ..."""
        return self._comm.name

    @property
    def local_rank(self) -> int:
        """The rank of this process among those of its host, from 0, as in torchrun and Horovod."""
        return self._placement.local_rank

    @property
    def local_size(self) -> int:
        """The number of ranks of the group on this host."""
        return self._placement.local_size

    @property
    def node_rank(self) -> int:
        """The number of this host among those of the group, in the order of their first ranks."""
        return self._placement.node_rank

    @property
    def node_count(self) -> int:
        """The number of hosts of the group."""
        return self._placement.node_count

    @property
    def device(self) -> int | None:
        """Index of this rank's GPU among the visible ones; None without a GPU."""
        return self._device

    @property
    def timeout(self) -> float:
        """Seconds after which an operation raises TimeoutError."""
        return self._timeout

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @property
    def transport(self) -> str:
        """The transport of host arrays.

        "self" for a group of one rank, "shm" (shared memory of one host), "hierarchical" (shared memory within hosts
        and messages between them), "mpi" or "tcp" (messages only).
        """
        return self._comm.transport

    def counters(self) -> _core.Counters:
        """Counters of this rank: operations started, messages sent and bytes sent."""
        return self._comm.counters()

    def __repr__(self) -> str:
        return f"<samestep.{type(self).__name__} {self.name!r}: rank {self.rank} of {self.size}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Backend cannot be pickled; call samestep.get_distributed_backend() where it is needed"
        )

    def __copy__(self: _Self) -> _Self:
        # What holds a group, such as an optimizer, can be copied, and the copy uses the same group.
        return self

    def __deepcopy__(self: _Self, memo: Any) -> _Self:
        return self

    # ---- groups

    def split(self: _Self, color: int | None, key: int = 0, *, timeout: float | None = None) -> _Self | None:
        """Divide the group: ranks with the same color form a new group. Collective.

        Args:
          color: >= 0; None: this rank joins no new group.
          key: the new ranks are ordered by (key, rank in this group).
          timeout: seconds; None for the group's timeout.

        Returns:
          The new group; None if `color` is None.

        Source: MPI 5.0, section 7.4.2 (MPI_Comm_split).
        """
        color = None if color is None else self._rank_number(color, "split", "color")
        key = self._rank_number(key, "split", "key")
        with _core.UserCall(f"split(color={color}, key={key})"):
            return self._split(color, key, self._seconds(timeout))

    def _split(self: _Self, color: int | None, key: int, timeout: float, called: str = "") -> _Self | None:
        """`split`; `called` is the name of a group that the package creates for itself."""
        comm = self._comm.split(-1 if color is None else color, key, timeout, called)
        # Collective in the parent, so that ranks without a new group take part too.
        table = self._allgather_facts((color, key), [(int, None), int])
        if comm is None:
            return None
        members = sorted((k, r) for r, (c, k) in enumerate(table) if c == color)
        return self._child(comm, [r for _, r in members])

    def group(self: _Self, ranks: Iterable[int], *, timeout: float | None = None) -> _Self:
        """Create a group of the given ranks, in this order. Only these ranks call it, all with the same list.

        Args:
          ranks: distinct ranks of this group, including this one.
          timeout: seconds; None for the group's timeout.

        Source: MPI 5.0, section 7.4.2 (MPI_Comm_create_group).
        """
        members = [int(r) for r in ranks]
        comm = self._comm.group(members, self._seconds(timeout))
        return self._child(comm, members)

    @property
    def node(self: _Self) -> _Self:
        """The group of the ranks on this host. On one host, this group itself.

        On several hosts it is created at the first use, which is collective over this group.
        """
        return self._made_node_and_cross()[0]

    @property
    def cross(self: _Self) -> _Self:
        """The group of one rank per host: those with this rank's `local_rank`. Created like `node`."""
        return self._made_node_and_cross()[1]

    def _made_node_and_cross(self: _Self) -> tuple[_Self, _Self]:
        if self._node_and_cross is None:
            if self.node_count == 1:
                alone = _core.make_self_communicator(f"{self.name}/cross")
                self._node_and_cross = self, self._child(alone, [self.rank])
            else:
                with _core.UserCall("the first use of node or cross"):
                    node = self._split(self.node_rank, 0, self._timeout, f"{self.name}/node")
                    cross = self._split(self.local_rank, 0, self._timeout, f"{self.name}/cross")
                assert node is not None
                assert cross is not None
                self._node_and_cross = node, cross
        return self._node_and_cross  # type: ignore[return-value]

    def _child(
        self: _Self, comm: _core.Communicator, ranks: list[int], *, timeout: float | None = None
    ) -> _Self:
        child = type(self)(
            comm,
            timeout=timeout or self._timeout,
            device=self._device,
            world_hosts=[self._hosts[rank] for rank in ranks],
            trusted=self._trusted,
        )
        child._members = ranks
        self._adopt(child)
        return child

    def _set_comm(self, comm: _core.Communicator) -> None:
        """Replace a revoked communicator by another one of the same ranks."""
        self._comm = comm
        self._replaced += 1
        self._cache.pop("fused", None)
        for call in self._cache.get("compiled calls", ()):
            call.move_to(comm)

    def _become(self: _Self, new: _Self) -> None:
        """Take the place of `new`, a group of the ranks that are left after a loss; this one has been abandoned."""
        kept = {"_changed": self._changed, "_replaced": self._replaced + 1, "_regroup": self._regroup}
        modules = self._cache.get("modules")
        self.__dict__ = new.__dict__ | kept
        self._comm = new._comm  # not in there, but where the core finds it
        if modules is not None:
            self._cache["modules"] = modules
        compiled.forget_programs()
        for follower, changed in list(self._changed.items()):
            changed(follower, self)

    def _follow(self, follower: Any, changed: Callable[[Any, Group], None]) -> None:
        """Call the method `changed` of `follower` with this group after its ranks have changed, as long as it lives."""
        self._changed[follower] = changed

    def _adopt(self, child: Group) -> None:
        """Close `child` when this group closes, before it."""
        child._parent = weakref.ref(self)
        self._children.append(child)

    def _leave_parent(self) -> None:
        """Drop the parent's reference to this group."""
        parent = self._parent() if self._parent is not None else None
        if parent is not None:
            parent._children.remove(self)

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else seconds(timeout)

    def _await_streams(self, given: list[Any], timeout: float | None) -> None:
        """Synchronize the streams of device arrays first, because copying them cannot time out.

        A call that is late leaves the group, like one that waits for peers.

        Args:
          given: the arrays, and anything else, which is ignored.
          timeout: seconds; None for the group's.
        """
        if given:
            _core.await_streams(given, self._comm, self._timeout if timeout is None else timeout)

    # ---- memory

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float64) -> np.ndarray[Any, Any]:
        """Return an uninitialised NumPy array, in shared memory of this host if the transport supports that.

        Operations on it are faster; results are the same as with any other array. `torch.from_numpy` turns it into a
        tensor.

        Args:
          shape: of the array.
          dtype: any dtype of NumPy.

        Raises:
          MemoryError: it is larger than the memory that is available.
        """
        return self._new(shape, dtype, "empty")

    def _new(self, shape: Any, dtype: Any, verb: str) -> np.ndarray[Any, Any]:
        kind = np.dtype(dtype)
        shape = arrays.extents(shape, kind.itemsize, verb)
        nbytes = math.prod(shape) * kind.itemsize
        if nbytes >= _LARGE:
            self._require_memory(nbytes, verb)
        block = _core.allocate_shared(self._comm, nbytes) if nbytes > 0 and not kind.hasobject else None
        if block is None:
            return np.empty(shape, kind)
        memory: np.ndarray[Any, Any] = np.frombuffer(memoryview(block), np.uint8, nbytes)
        shaped: np.ndarray[Any, Any] = memory.view(kind).reshape(shape)
        return shaped

    def _require_memory(self, nbytes: int, verb: str) -> None:
        """Refuse what would end with the process being killed: shared memory is present from its first use on."""
        available = numpy_memory.available_memory()
        usage = _core.shared_usage(self._comm)
        unused = max(0, usage.present - usage.used) if usage is not None else 0
        if available is not None and nbytes > available + unused:
            raise MemoryError(
                f"{verb}: an array of {nbytes} bytes does not fit into memory, of which {available} bytes are "
                "available on this machine and in its control group; make a smaller one"
            )

    def zeros(self, shape: int | tuple[int, ...], dtype: Any = np.float64) -> np.ndarray[Any, Any]:
        """As `empty`, with all elements zero."""
        array = self._new(shape, dtype, "zeros")
        array[...] = 0
        return array

    # ---- the end

    def close(self, *, timeout: float | None = None) -> None:
        """End the group and its subgroups. Collective, idempotent.

        Collectives that all ranks have started complete first. Pending sends and receives fail with
        `NotInitializedError`. After an error that ended the group, `close` does not wait for other ranks. It raises
        that error if it has ended blocking calls on device memory that had returned, and no call has raised it.

        Args:
          timeout: seconds; None for the group's timeout.
        """
        if not self._begin_end():
            return
        with contextlib.ExitStack() as acts:  # in reverse; each, whatever the others raise
            acts.callback(self._at_end)
            acts.callback(self._leave_parent)
            acts.callback(lambda: self._end(self._seconds(timeout)))
            for child in self._children:
                acts.callback(self._close_child, child, timeout)

    def _close_child(self, child: Group, timeout: float | None) -> None:
        if self._comm.usable:
            child.close(timeout=timeout)
        else:  # the failed rank may be a member of the subgroup
            child._abandon(f"{self._comm.name} had ended with an error")

    def _begin_end(self) -> bool:
        """Whether this call closes the group; true only for the first caller."""
        if self._is_forked:  # the lock may be held by a thread that fork did not copy
            self._closed = True
            return False
        with self._ending:
            first, self._closed = not self._closed, True
        return first

    def _end(self, timeout: float) -> None:
        met = False
        try:
            was_usable = self._comm.usable
            met = self._close(self._comm, timeout) and was_usable
        finally:
            for beside in filter(None, (self._control, self._bootstrap_comm)):
                if not met:  # its ranks may not know of the error: they would wait for each other
                    beside.abandon(f"{self._comm.name} had ended with an error")
                self._close(beside, timeout)

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a fork of the rank, and so no member of the group."""
        return os.getpid() != self._pid

    def _call_at_end(self, end: Callable[[], None]) -> None:
        """Register `end`, which is called after the group has ended, before the callbacks registered earlier."""
        then = self._at_end

        def both() -> None:
            try:
                end()
            finally:
                then()

        self._at_end = both

    def _close(self, comm: _core.Communicator, timeout: float) -> bool:
        """Close `comm`. Returns whether all ranks have taken part."""
        try:
            comm.close(timeout)
        except PeerLostError as error:  # another rank has ended it: there is no rank to wait for
            comm.abandon(str(error))
            comm.close(self._timeout)
            return False
        return True

    def _abandon(self, reason: str, *, finished: bool = False) -> None:
        """Leave without the other ranks, which get `reason`. `finished`: the program has ended without an error."""
        if self._is_forked:
            return
        for child in self._children[::-1]:
            child._abandon(reason, finished=finished)
        if self._begin_end():
            self._leave_parent()
            for comm in filter(None, (self._comm, self._control, self._bootstrap_comm)):
                comm.abandon(reason, finished)
            self._at_end()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon(f"it ended with {error_line(error)}")


other_names.refuse(Group, Work)

"""The backend: a group of ranks with everything that can be done with it."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import numpy as np

from samestep import _core, arrays, hosts
from samestep.errors import PeerLostError
from samestep.list_verbs import ListVerbs
from samestep.objects import MessageVerbs
from samestep.reduce_ops import AVG
from samestep.work import Status, seconds

__all__ = ["Backend", "MPIBackend", "NCCLBackend", "NativeBackend"]

_Self = TypeVar("_Self", bound="Backend")


class Backend(MessageVerbs, ListVerbs):
    """A group of ranks: the world that `initialize` returns, or a group made from it.

    Not to be constructed: call `samestep.initialize()`, `split` or `group`.
    """

    kind: ClassVar[str] = ""
    """"mpi", "nccl" or "native": the name that `initialize` takes."""

    def __init__(
        self,
        comm: _core.Communicator,
        *,
        timeout: float,
        device: int | None = None,
        world_hosts: list[str],
        at_end: Callable[[], None] = lambda: None,
        beneath: _core.Communicator | None = None,
    ) -> None:
        self._comm = comm
        self._pid = os.getpid()
        self._at_end = at_end
        self._beneath = beneath  # what brought the ranks together, if not `comm`
        self._timeout = timeout
        self._device = device
        self._hosts = world_hosts  # by rank of this group
        self._placement = hosts.place(world_hosts, comm.rank)
        for verb in _core.HOT_VERBS:  # as methods of Python the calls of every step would cost as much again
            general = functools.partial(getattr(type(self), verb), weakref.proxy(self))
            setattr(self, verb, _core.hot_call(verb, comm, timeout, general))
        for verb in ("send", "recv", "sendrecv"):
            general = functools.partial(getattr(type(self), verb), weakref.proxy(self))
            setattr(self, verb, _core.hot_message(verb, comm, timeout, Status, general))
        self._children: list[Backend] = []
        self._node: Backend | None = None
        self._cross: Backend | None = None
        self._closed = False

    # ---- who and where

    @property
    def name(self) -> str:
        """Name of the group in messages: "world", "world/split 0 color 1", ..."""
        return self._comm.name

    @property
    def local_rank(self) -> int:
        """Number of this rank among those of its host (torchrun's and Horovod's meaning), from 0."""
        return self._placement.local_rank

    @property
    def local_size(self) -> int:
        """How many ranks of the group run on this host."""
        return self._placement.local_size

    @property
    def node_rank(self) -> int:
        """Number of this host among those of the group, in the order of their first ranks."""
        return self._placement.node_rank

    @property
    def node_count(self) -> int:
        """How many hosts the group has."""
        return self._placement.node_count

    @property
    def device(self) -> int | None:
        """Index, among the visible ones, of the GPU assigned to this rank; None without one."""
        return self._device

    @property
    def timeout(self) -> float:
        """Seconds that an operation may take before it raises TimeoutError."""
        return self._timeout

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @property
    def engine(self) -> str:
        """What carries host arrays.

        "self" for a group of one, "node" (shared memory of one host), "hier" (so within hosts, messages between
        them), "mpi" or "tcp" (messages alone).
        """
        return self._comm.engine

    def counters(self) -> _core.Counters:
        """Operations started, messages sent and bytes sent by this rank so far."""
        return self._comm.counters()

    def __repr__(self) -> str:
        return f"<samestep.{type(self).__name__} {self.name!r}: rank {self.rank} of {self.size}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Backend cannot be pickled; call samestep.get_distributed_backend() where it is needed"
        )

    # ---- groups

    def split(self: _Self, color: int | None, key: int = 0, *, timeout: float | None = None) -> _Self | None:
        """Divide the group: ranks that give the same color form a new group. Collective.

        Args:
          color: >= 0, or None to belong to no new group.
          key: ranks are ordered by (key, old rank).
          timeout: seconds, else the group's.

        Returns:
          The new group, or None where `color` is None.

        Source: MPI 5.0, section 7.4.2 (MPI_Comm_split).
        """
        color = None if color is None else self._rank_number(color, "split", "color")
        key = self._rank_number(key, "split", "key")
        comm = self._comm.split(-1 if color is None else color, key, self._seconds(timeout))
        # Collective in the parent, so that ranks without a new group take part too.
        table = self.allgather_object((color, key))
        if comm is None:
            return None
        members = sorted((k, r) for r, (c, k) in enumerate(table) if c == color)
        return self._child(comm, [self._hosts[r] for _, r in members])

    def group(self: _Self, ranks: Iterable[int], *, timeout: float | None = None) -> _Self:
        """The group of these ranks, in this order. Called by these ranks only, all with the same list.

        Args:
          ranks: distinct ranks of this group, this one among them.
          timeout: seconds, else the group's.

        Source: MPI 5.0, section 7.4.2 (MPI_Comm_create_group).
        """
        members = [int(r) for r in ranks]
        comm = self._comm.group(members, self._seconds(timeout))
        return self._child(comm, [self._hosts[r] for r in members])

    @property
    def node(self: _Self) -> _Self:
        """The group of the ranks on this host. On one host, this group itself.

        Where there are several hosts it is made at the first use, which is collective over this group.
        """
        return self._levels()[0]

    @property
    def cross(self: _Self) -> _Self:
        """The group of one rank per host: those with this rank's `local_rank`. Made like `node`."""
        return self._levels()[1]

    def _levels(self: _Self) -> tuple[_Self, _Self]:
        if self._node is None or self._cross is None:
            if self.node_count == 1:
                alone = _core.make_self_communicator(f"{self.name}/cross")
                node, cross = self, self._child(alone, [self._hosts[self.rank]])
            else:
                within, across = self.split(self.node_rank), self.split(self.local_rank)
                assert within is not None
                assert across is not None
                node, cross = within, across
            self._node, self._cross = node, cross
            return node, cross
        return self._node, self._cross  # type: ignore[return-value]

    def _child(
        self: _Self, comm: _core.Communicator, world_hosts: list[str], *, timeout: float | None = None
    ) -> _Self:
        child = type(self)(
            comm, timeout=timeout or self._timeout, device=self._device, world_hosts=world_hosts
        )
        self._children.append(child)
        return child

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else seconds(timeout)

    # ---- memory

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float64) -> np.ndarray[Any, Any]:
        """A NumPy array for use with this group, its elements not set. `torch.from_numpy` makes a tensor of it.

        Engines that share memory between the ranks of a host place it there; the results are the same anyhow.
        """
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        block = _core.allocate_shared(self._comm, nbytes) if nbytes > 0 and not kind.hasobject else None
        if block is None:
            return np.empty(shape, kind)
        memory: np.ndarray[Any, Any] = np.frombuffer(memoryview(block), np.uint8, nbytes)
        shaped: np.ndarray[Any, Any] = memory.view(kind).reshape(shape)
        return shaped

    def zeros(self, shape: int | tuple[int, ...], dtype: Any = np.float64) -> np.ndarray[Any, Any]:
        """As `empty`, all elements zero."""
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def empty_like(self, tree: Any) -> Any:
        """A tree of new arrays with the shapes, dtypes and libraries (NumPy, torch) of the leaves of `tree`."""
        from samestep import trees

        _, leaves, rebuild = trees.flatten(tree)
        return rebuild([arrays.new_like(leaf) if arrays.is_array(leaf) else leaf for leaf in leaves])

    # ---- training helpers

    def synchronize(
        self, tree: Any, *, root: int = 0, objects: str = "keep", timeout: float | None = None
    ) -> Any:
        """Give every rank root's values of all leaves of a tree; see `samestep.synchronize`."""
        from samestep import synchronization

        return synchronization.synchronize(self, tree, root=root, objects=objects, timeout=timeout)

    def allreduce_gradients(self, grads: Any, op: Any = AVG, *, timeout: float | None = None) -> Any:
        """Reduce all arrays of a tree in a handful of messages; see `samestep.allreduce_gradients`."""
        from samestep import gradients

        return gradients.allreduce_gradients(self, grads, op, timeout=timeout)

    def allreduce_tree(self, tree: Any, op: Any = "sum", *, timeout: float | None = None) -> Any:
        """`allreduce` of all arrays of a tree, fused; in place where leaves can be written.

        Returns:
          The tree with the reduced leaves.

        Example:
          >>> import numpy as np, samestep as ss
          >>> backend = ss.initialize()
          >>> backend.allreduce_tree({"w": np.ones(2), "b": np.zeros(1)})
          {'w': array([1., 1.]), 'b': array([0.])}
        """
        from samestep import gradients

        return gradients.allreduce_tree(self, tree, op, timeout=timeout)

    def println(self, *args: Any, timeout: float | None = None) -> None:
        """Print a line from every rank, whole and in order of rank. Collective."""
        from samestep import printing

        printing.println(self, *args, timeout=timeout)

    # ---- the end

    def close(self, *, timeout: float | None = None) -> None:
        """End the group and those made from it. Collective, idempotent.

        After an error that ended the group nobody is waited for.
        """
        if self._closed:
            return
        self._closed = True
        if self._is_forked:
            return
        for child in reversed(self._children):
            if self._comm.usable:
                child.close(timeout=timeout)
            else:  # the rank that ended this group may be one of that
                child._abandon(f"{self._comm.name} had ended with an error")
        try:
            self._end(self._seconds(timeout))
        finally:
            self._at_end()

    def _end(self, timeout: float) -> None:
        met = False
        try:
            was_usable = self._comm.usable
            met = self._close(self._comm, timeout) and was_usable
        finally:
            if self._beneath is not None:
                if not met:  # which it does not know: its ranks would wait for each other
                    self._beneath.abandon(f"{self._comm.name} had ended with an error")
                self._close(self._beneath, timeout)

    @property
    def _is_forked(self) -> bool:
        """Whether this process was forked from the rank: what it does is nothing to the others."""
        return os.getpid() != self._pid

    def _call_at_end(self, end: Callable[[], None]) -> None:
        """Calls `end` once the group has ended, before what was to be called then."""
        then = self._at_end

        def both() -> None:
            try:
                end()
            finally:
                then()

        self._at_end = both

    def _close(self, comm: _core.Communicator, timeout: float) -> bool:
        """Whether all ranks met once more."""
        try:
            comm.close(timeout)
        except PeerLostError as error:  # the others have ended it: there is nobody to wait for
            comm.abandon(str(error))
            comm.close(self._timeout)
            return False
        return True

    def _abandon(self, reason: str) -> None:
        """This process leaves without the others: those who wait for it are told."""
        if self._is_forked:
            return
        for child in self._children:
            child._abandon(reason)
        if not self._closed:
            self._closed = True
            self._comm.abandon(reason)
            if self._beneath is not None:
                self._beneath.abandon(reason)
            self._at_end()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon(f"it ended with {type(error).__name__}: {error}")


class MPIBackend(Backend):
    """Ranks of an MPI job, host arrays through its MPI library, whichever that is.

    Started by `mpirun`, `srun` or `samestep run`. See `samestep.initialize`.
    """

    kind = "mpi"


class NativeBackend(Backend):
    """Ranks with nothing installed but this package: of one host through shared memory, of several over TCP.

    Started by `samestep run`, torchrun or any other means that sets the same variables. See `samestep.initialize`.
    """

    kind = "native"


class NCCLBackend(Backend):
    """Device arrays through NCCL or RCCL, host arrays through another backend."""

    kind = "nccl"


def _warn(text: str) -> None:
    import logging  # costs as much to import as half the package

    logging.getLogger("samestep").warning(text)

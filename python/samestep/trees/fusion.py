"""Collectives over many arrays in few messages: small ones share a bucket, large ones stay where they lie."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import numpy as np

from samestep import _core, arrays
from samestep._util.deadline import seconds
from samestep.arrays import ArrayInfo, of_torch
from samestep.errors import UnavailableError
from samestep.group.group import Group
from samestep.group.work import Enqueued, Work
from samestep.reduce_ops import ReduceOp

SMALL_NBYTES = _core.MIN_UNPACKED_BYTES  # from here on a copy costs more than a message
BUCKET_NBYTES = _core.TREE_BUCKET_BYTES
_UNDER_WAY = 4  # messages; bounds the memory held by buckets
_LEAST_S = 1e-6  # operations refuse a timeout of 0
DEVICE_BUCKET_NBYTES = 25 << 20  # of one operation of NCCL, as in torch's DistributedDataParallel

Timer = Callable[[], float | None]
_Message = Generator[None, None, None]  # starts the operation, yields, then waits and stores the results


def plan_buckets(leaf_nbytes: Sequence[int], bucket_nbytes: int) -> list[range]:
    """Cut leaves, in the given order, into runs that are moved in one message each. A larger leaf gets its own.

    Pure: every rank computes the same plan from the same shapes, so no rank has to be asked.

    Example:
      >>> plan_buckets([4, 4, 8, 20, 1], bucket_nbytes=8)
      [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    """
    if bucket_nbytes <= 0:
        raise ValueError(f"bucket_nbytes must be positive, got {bucket_nbytes}")
    buckets, start, filled = [], 0, 0
    for i, nbytes in enumerate(leaf_nbytes):
        if i > start and filled + nbytes > bucket_nbytes:
            buckets.append(range(start, i))
            start, filled = i, 0
        filled += nbytes
    if start < len(leaf_nbytes):
        buckets.append(range(start, len(leaf_nbytes)))
    return buckets


def plan_messages(
    infos: Sequence[ArrayInfo],
    which: Sequence[int] | None = None,
    *,
    mix_dtypes: bool,
    with_nccl: bool = False,
) -> list[list[int]]:
    """Decide which leaves travel together: lists of leaf indices, one per message.

    Large leaves are sent alone, and those of host and device memory separately. Empty leaves are in no message.
    Messages are ordered by their last leaf, that is, by when they are complete if leaves become ready in order.

    Args:
      which: the indices of those to plan for, in order; None: all.
      mix_dtypes: whether one message may carry several dtypes (a broadcast moves bytes, a reduction cannot).
      with_nccl: whether NCCL moves what is in device memory: a copy there costs less than an operation.
    """
    alone: list[list[int]] = []
    small: dict[tuple[str, str], list[int]] = {}
    for i in range(len(infos)) if which is None else which:
        info = infos[i]
        if info.nbytes >= (DEVICE_BUCKET_NBYTES if with_nccl and info.device != "cpu" else SMALL_NBYTES):
            alone.append([i])
        elif info.nbytes:
            small.setdefault((info.device, "" if mix_dtypes else info.dtype), []).append(i)
    together = [
        [leaves[j] for j in bucket]
        for (device, _), leaves in small.items()
        for bucket in plan_buckets(
            [infos[i].nbytes for i in leaves],
            DEVICE_BUCKET_NBYTES if with_nccl and device != "cpu" else BUCKET_NBYTES,
        )
    ]
    return sorted(alone + together, key=lambda message: message[-1])


def fused(backend: Group) -> _core.FusedCollectives:
    """Collectives over plain trees, with their memory, of this group."""
    made: _core.FusedCollectives | None = backend._cache.get("fused")
    if made is None:  # of the objects that several threads make here one stays
        made = backend._cache.setdefault("fused", _core.FusedCollectives(backend._comm))
    return made


def timer(timeout: float | None) -> Timer:
    """The seconds left of `timeout` each time it is called; None for None, which leaves it to the backend.

    Where none are left, as many as operations take for a timeout: the next one raises the TimeoutError.
    """
    if timeout is None:
        return lambda: None
    end = time.monotonic() + seconds(timeout)
    return lambda: max(_LEAST_S, end - time.monotonic())


def allreduce_leaves(
    backend: Group,
    leaves: Sequence[Any],
    infos: Sequence[ArrayInfo],
    code: int,
    *factors: float,
    names: Sequence[str],
    left: Timer = lambda: None,
) -> list[Any]:
    """Reduce each array with those in its place on the other ranks, as `Backend.allreduce` would one by one.

    Args:
      leaves: arrays of the same shapes and dtypes on all ranks, no two of them the same memory.
      code, factors: of the operator, as `resolve` returns them; behind those of MEAN its divisor.

    Returns:
      The same arrays, now holding the results; new ones of the same library for those that cannot be written.
    """
    nccl_reduces = functools.cache(lambda dtype: _core.nccl_reduces(dtype, code))

    def start(x: Any) -> Work[Any]:
        into, finish = backend._output_like(x, None, False, "allreduce")
        return backend._enqueue_allreduce(x, into, code, *factors).as_work(backend.timeout, finish)

    def on_device(message: list[int], targets: list[Any]) -> Enqueued:
        inputs, dtype = [leaves[i] for i in message], infos[message[0]].dtype
        if backend.size > 1 and of_torch.gathers(inputs, dtype):  # nothing waits for those of a single rank
            flat = of_torch.gather(inputs, dtype if nccl_reduces(dtype) else "float32")
            inner = _core.allreduce_many(backend._comm, [flat], [flat], code, factors[0])
            return Enqueued(inner, lambda: of_torch.scatter(flat, targets))
        if nccl_reduces(dtype):
            return Enqueued(_core.allreduce_many(backend._comm, inputs, targets, code, factors[0]))
        wide = [arrays.of(x).widen(x) for x in inputs]

        def store() -> None:
            for x, target in zip(wide, targets, strict=True):
                arrays.of(target).store_rounded(x, target)

        return Enqueued(_core.allreduce_many(backend._comm, wide, wide, code, factors[0]), store)

    def takes(i: int) -> bool:
        return nccl_reduces(infos[i].dtype) or (code == ReduceOp.AVG.value and arrays.converts(leaves[i]))

    return _Leaves(backend, leaves, infos, names, left, start, on_device, takes).communicate()


def bcast_leaves(
    backend: Group,
    leaves: Sequence[Any],
    infos: Sequence[ArrayInfo],
    names: Sequence[str],
    *,
    root: int,
    left: Timer,
) -> list[Any]:
    """Give each array the value it has on rank `root`. Arguments and result as for `allreduce_leaves`."""
    if backend.size == 1:
        return list(leaves)

    is_root = backend.rank == root

    def on_device(message: list[int], targets: list[Any]) -> Enqueued:
        dtype = infos[message[0]].dtype
        if of_torch.gathers(targets, dtype):
            flat = of_torch.gather(targets, dtype)
            inner = _core.bcast_many(backend._comm, [flat], root)
            return Enqueued(inner, None if is_root else lambda: of_torch.scatter(flat, targets))
        return Enqueued(_core.bcast_many(backend._comm, targets, root))

    start = functools.partial(backend.ibcast, root=root)
    results = _Leaves(backend, leaves, infos, names, left, start, on_device, root=root).communicate()
    return list(map(arrays.as_received, results)) if is_root else results


@dataclasses.dataclass
class _Leaves:
    """The leaves of one call, and the steps of each message of some of them, which `_run` makes."""

    backend: Group
    given: Sequence[Any]
    infos: Sequence[ArrayInfo]
    names: Sequence[str]
    left: Timer
    start: Callable[[Any], Work[Any]]
    """Starts the operation on one array."""
    start_on_device: Callable[[list[int], list[Any]], Enqueued]
    """Starts that of NCCL on the leaves of a message; with the arrays that get the results."""
    takes: Callable[[int], bool] = lambda _: True
    """Whether NCCL works on a leaf where it lies."""
    root: int | None = None
    """Of a broadcast, which moves bytes; None for a reduction, which cannot mix dtypes."""

    def __post_init__(self) -> None:
        self.results = list(self.given)
        self.writes = self.backend.rank != self.root
        self.reads = self.root is None or not self.writes

    def communicate(self) -> list[Any]:
        if _core.memory_is_in_use():  # what copies leaves without the core would not see it
            _core.settle(self.given, to_write=self.writes)
        ours = self.for_nccl()
        many = plan_messages(self.infos, ours, mix_dtypes=False, with_nccl=True)
        others = sorted(set(range(len(self.infos))).difference(ours))
        if many:
            self.refuse_capture(others, self.infos[ours[0]].dtype)
        messages = plan_messages(self.infos, others, mix_dtypes=self.root is not None)
        of_host = ((self.alone if len(m) == 1 else self.together)(m) for m in messages)
        _run(itertools.chain(map(self.on_device, many), of_host))
        return self.results

    def for_nccl(self) -> list[int]:
        """Leaves in device memory that NCCL works on where they lie.

        The same on all ranks, which have compared dtypes, shapes and kinds of memory, and nothing else.
        """
        on_device = [i for i, info in enumerate(self.infos) if info.device != "cpu"]
        if not on_device or not _core.has_nccl(self.backend._comm):
            return []
        return [i for i in on_device if self.infos[i].nbytes and self.takes(i)]

    def refuse_capture(self, leaves: list[int], reduced: str) -> None:
        """Raise UnavailableError if leaves that go through the host are captured, before others are in the graph."""
        for i in leaves:
            if self.infos[i].device != "cpu" and self.infos[i].nbytes:
                try:
                    _core.refuse_capture(self.given[i], leaves_text([self.names[i]]))
                except UnavailableError as error:
                    _core.tell_refusal(self.backend._comm, "allreduce", str(error), reduced=reduced)
                    raise

    def of(self, message: list[int]) -> tuple[list[Any], list[ArrayInfo]]:
        return [self.given[i] for i in message], [self.infos[i] for i in message]

    def call_on(self, message: list[int]) -> _core.UserCall:
        """Names the leaves of a message in texts of errors, behind what the user called."""
        return _core.UserCall(leaves_text([self.names[i] for i in message]), is_part=True)

    def alone(self, message: list[int]) -> _Message:
        (i,) = message
        with self.call_on(message):
            work = self.start(self.given[i])
        yield
        received = work._wait_blocking(self.left())
        if self.writes:
            self.results[i] = received

    def together(self, message: list[int]) -> _Message:
        leaves, infos = self.of(message)
        on_device = [x for x, info in zip(leaves, infos, strict=True) if info.device != "cpu"]
        pool: list[np.ndarray] = self.backend._cache.setdefault("buckets", [])
        try:  # asked first, another thread could take the last one meanwhile
            memory = pool.pop()
        except IndexError:
            memory = self.backend.empty((BUCKET_NBYTES,), "uint8")
        packed = memory[: sum(info.nbytes for info in infos)]
        if self.reads:
            self.backend._await_streams(on_device, self.left())
            _core.pack(leaves, packed, as_they_lie=True)
        with self.call_on(message):
            work = self.start(packed if self.root is not None else as_dtype(packed, infos[0].dtype))
        yield
        work._wait_blocking(self.left())
        if self.writes:
            self.backend._await_streams(on_device, self.left())
            targets = arrays.targets(leaves, infos)
            _core.unpack(packed, targets, as_they_lie=True)
            arrays.deliver(self.results, self.infos, message, targets)
        pool.append(memory)  # after success only: until then it may be in use

    def on_device(self, message: list[int]) -> _Message:
        leaves, infos = self.of(message)
        targets = arrays.targets(leaves, infos) if self.writes else leaves
        with self.call_on(message):
            started = self.start_on_device(message, targets)
        work: Work[None] = Work(started.inner, self.backend.timeout)
        yield
        work._wait_blocking(self.left())
        if started.complete is not None:
            started.complete()
        if self.writes:
            arrays.deliver(self.results, self.infos, message, targets)


def leaves_text(names: Sequence[str]) -> str:
    """The leaves that share a message.

    Example:
      >>> leaves_text(["w"]), leaves_text(["w", "b", "c"])
      ("leaf 'w'", "leaves 'w' to 'c'")
    """
    return f"leaf {names[0]!r}" if len(names) == 1 else f"leaves {names[0]!r} to {names[-1]!r}"


def _run(messages: Iterable[_Message]) -> None:
    under_way: collections.deque[_Message] = collections.deque()
    for message in messages:
        next(message)
        under_way.append(message)
        if len(under_way) > _UNDER_WAY:
            next(under_way.popleft(), None)
    for message in under_way:
        next(message, None)


def as_dtype(memory: np.ndarray, dtype: str) -> Any:
    """Bytes as elements of `dtype`: an array of NumPy, or of torch if NumPy lacks the type."""
    try:
        return memory.view(np.dtype(dtype))
    except TypeError:  # NumPy has no bfloat16 of its own; then the leaves come from torch
        return of_torch.of_bytes(memory, dtype)

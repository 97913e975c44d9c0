"""Collectives over many arrays in few messages: small ones share a bucket, large ones stay where they lie."""

from __future__ import annotations

import collections
import functools
import itertools
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep import _core, arrays
from samestep._util.deadline import seconds
from samestep.arrays import ArrayInfo
from samestep.group.group import Group
from samestep.group.work import Enqueued, Work
from samestep.reduce_ops import Op, ReduceOp, resolve

SMALL_NBYTES = _core.MIN_UNPACKED_BYTES  # from here on a copy costs more than a message
BUCKET_NBYTES = _core.TREE_BUCKET_BYTES
_UNDER_WAY = 4  # messages; bounds the memory held by buckets
_LEAST_S = 1e-6  # operations refuse a timeout of 0
DEVICE_BUCKET_NBYTES = 25 << 20  # of one operation of NCCL, as in torch's DistributedDataParallel

Timer = Callable[[], float | None]
_Message = Generator[None, None, None]  # starts the operation, yields, then waits and stores the results


def plan_buckets(leaf_nbytes: Sequence[int], bucket_nbytes: int) -> list[range]:
    """Cut leaves, in the given order, into runs that are moved in one message each.

    Pure and deterministic: every rank computes the same plan from the same shapes, so no rank has to be
    asked.

    Args:
      leaf_nbytes: size of each leaf in bytes, each >= 0.
      bucket_nbytes: most bytes in one bucket, > 0. A larger leaf gets its own bucket.

    Returns:
      Consecutive index ranges that cover `range(len(leaf_nbytes))`.

    Raises:
      ValueError: `bucket_nbytes` is not positive.

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
    infos: Sequence[ArrayInfo], *, mix_dtypes: bool, with_nccl: bool = False
) -> list[list[int]]:
    """Decide which leaves travel together: lists of leaf indices, one per message.

    Large leaves are sent alone, and those of host and device memory separately. Empty leaves are in no message.
    Messages are ordered by their last leaf, that is, by when they are complete if leaves become ready in order.

    Args:
      infos: the leaves.
      mix_dtypes: whether one message may carry several dtypes (a broadcast moves bytes, a reduction cannot).
      with_nccl: whether NCCL moves what is in device memory: a copy there costs less than an operation.
    """
    alone: list[list[int]] = []
    small: dict[tuple[str, str], list[int]] = {}
    for i, info in enumerate(infos):
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

    Raises:
      InvalidArgumentError: `timeout` is no positive number of seconds.
    """
    if timeout is None:
        return lambda: None
    end = time.monotonic() + seconds(timeout)
    return lambda: max(_LEAST_S, end - time.monotonic())


def allreduce_leaves(
    backend: Group,
    leaves: Sequence[Any],
    infos: Sequence[ArrayInfo],
    op: Op,
    *,
    names: Sequence[str],
    timeout: float | None = None,
) -> list[Any]:
    """Reduce each array with those in its place on the other ranks, as `Backend.allreduce` would one by one.

    Args:
      leaves: arrays of the same shapes and dtypes on all ranks, no two of them the same memory.
      infos: `arrays.info` of each.
      op: as for `Backend.allreduce`.
      names: of the leaves, for texts of errors.
      timeout: seconds for all of it.

    Returns:
      The same arrays, now holding the results; new ones of the same library for those that cannot be written.
    """
    code, factor = resolve(op)
    nccl_reduces = functools.cache(lambda dtype: _core.nccl_reduces(dtype, code))

    def on_device(message: list[int], targets: list[Any]) -> Enqueued:
        inputs, dtype = [leaves[i] for i in message], infos[message[0]].dtype
        if arrays.gathers(inputs, dtype):
            flat = arrays.gather(inputs, dtype if nccl_reduces(dtype) else "float32")
            inner = _core.allreduce_many(backend._comm, [flat], [flat], code, factor)
            return Enqueued(inner, lambda: arrays.scatter(flat, targets))
        if nccl_reduces(dtype):
            return Enqueued(_core.allreduce_many(backend._comm, inputs, targets, code, factor))
        wide = list(map(arrays.to_float32, inputs))

        def store() -> None:
            for x, target in zip(wide, targets, strict=True):
                arrays.store_rounded(x, target)

        return Enqueued(_core.allreduce_many(backend._comm, wide, wide, code, factor), store)

    def takes(i: int) -> bool:
        return nccl_reduces(infos[i].dtype) or (code == ReduceOp.AVG.value and arrays.converts(leaves[i]))

    how = _How(lambda x: backend.iallreduce(x, op), on_device, takes, mix_dtypes=False)
    return _communicate(backend, leaves, infos, how, names=names, timeout=timeout)


def bcast_leaves(
    backend: Group,
    leaves: Sequence[Any],
    infos: Sequence[ArrayInfo],
    root: int,
    *,
    names: Sequence[str],
    timeout: float | None = None,
) -> list[Any]:
    """Give each array the value it has on rank `root`. Arguments and result as for `allreduce_leaves`."""
    if backend.size == 1:
        return list(leaves)

    is_root = backend.rank == root

    def on_device(message: list[int], targets: list[Any]) -> Enqueued:
        dtype = infos[message[0]].dtype
        if arrays.gathers(targets, dtype):
            flat = arrays.gather(targets, dtype)
            inner = _core.bcast_many(backend._comm, [flat], root)
            return Enqueued(inner, None if is_root else lambda: arrays.scatter(flat, targets))
        return Enqueued(_core.bcast_many(backend._comm, targets, root))

    start = functools.partial(backend.ibcast, root=root)
    how = _How(start, on_device, lambda _: True, mix_dtypes=True, reads=is_root, writes=not is_root)
    results = _communicate(backend, leaves, infos, how, names=names, timeout=timeout)
    return list(map(arrays.as_received, results)) if is_root else results


class _How(NamedTuple):
    """What a collective does with each message."""

    start: Callable[[Any], Work[Any]]
    """Starts the operation on one array."""
    start_on_device: Callable[[list[int], list[Any]], Enqueued]
    """Starts that of NCCL on the leaves of a message; with the arrays that get the results."""
    takes: Callable[[int], bool]
    """Whether NCCL works on a leaf where it lies."""
    mix_dtypes: bool
    reads: bool = True
    writes: bool = True


def _communicate(
    backend: Group,
    leaves: Sequence[Any],
    infos: Sequence[ArrayInfo],
    how: _How,
    *,
    names: Sequence[str],
    timeout: float | None,
) -> list[Any]:
    left = timer(timeout)
    results = list(leaves)

    def await_streams(message: list[int]) -> None:
        backend._await_streams([leaves[i] for i in message if infos[i].device != "cpu"], left())

    def call_on(message: list[int]) -> _core.UserCall:
        """Names the leaves of a message in texts of errors, behind what the user called."""
        return _core.UserCall(leaves_text([names[i] for i in message]), is_part=True)

    def targets_of(message: list[int]) -> list[Any]:
        """Where the results go: the leaves, or new arrays for those that cannot be written."""
        return [leaves[i] if infos[i].writable else arrays.new_like(leaves[i]) for i in message]

    def store(message: list[int], targets: list[Any]) -> None:
        bump_versions(targets)
        for i, target in zip(message, targets, strict=True):
            results[i] = target if infos[i].writable else arrays.to_library_of(leaves[i], target)

    def alone(message: list[int]) -> _Message:
        (i,) = message
        with call_on(message):
            work = how.start(leaves[i])
        yield
        received = work._wait_blocking(left())
        if how.writes:
            results[i] = received

    def together(message: list[int]) -> _Message:
        with_memory = _memory(backend)
        packed = with_memory[: sum(infos[i].nbytes for i in message)]
        if how.reads:
            await_streams(message)
            _core.pack([leaves[i] for i in message], packed, as_they_lie=True)
        with call_on(message):
            work = how.start(packed if how.mix_dtypes else as_dtype(packed, infos[message[0]].dtype))
        yield
        work._wait_blocking(left())
        if how.writes:
            await_streams(message)
            targets = targets_of(message)
            _core.unpack(packed, targets, as_they_lie=True)
            store(message, targets)
        _pool(backend).append(with_memory)

    def on_device(message: list[int]) -> _Message:
        targets = targets_of(message) if how.writes else [leaves[i] for i in message]
        with call_on(message):
            started = how.start_on_device(message, targets)
        work: Work[None] = Work(started.inner, backend.timeout)
        yield
        work._wait_blocking(left())
        if started.complete is not None:
            started.complete()
        if how.writes:
            store(message, targets)

    many = _for_nccl(backend, infos, how.takes)
    messages = _plan_without(many, infos, mix_dtypes=how.mix_dtypes)
    of_host = (alone(message) if len(message) == 1 else together(message) for message in messages)
    _run(itertools.chain(map(on_device, many), of_host))
    return results


def _for_nccl(backend: Group, infos: Sequence[ArrayInfo], takes: Callable[[int], bool]) -> list[list[int]]:
    """Leaves in device memory that NCCL works on where they lie, those of one dtype together. Empty without NCCL.

    The same on all ranks, which have compared dtypes, shapes and kinds of memory, and nothing else.
    """
    if all(info.device == "cpu" for info in infos) or not _core.has_nccl(backend._comm):
        return []
    by_dtype: dict[str, list[int]] = {}
    for i, info in enumerate(infos):
        if info.device != "cpu" and info.nbytes and takes(i):
            by_dtype.setdefault(info.dtype, []).append(i)
    return [
        [leaves[j] for j in bucket]
        for leaves in by_dtype.values()
        for bucket in plan_buckets([infos[i].nbytes for i in leaves], DEVICE_BUCKET_NBYTES)
    ]


def _plan_without(taken: list[list[int]], infos: Sequence[ArrayInfo], *, mix_dtypes: bool) -> list[list[int]]:
    """`plan_messages` for the leaves that are in none of the messages `taken`."""
    if not taken:
        return plan_messages(infos, mix_dtypes=mix_dtypes)
    left = sorted(set(range(len(infos))) - {i for message in taken for i in message})
    return [[left[j] for j in m] for m in plan_messages([infos[i] for i in left], mix_dtypes=mix_dtypes)]


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


def _pool(backend: Group) -> list[np.ndarray]:
    pool: list[np.ndarray] = backend._cache.setdefault("buckets", [])
    return pool


def _memory(backend: Group) -> np.ndarray:
    """One bucket's worth of bytes. Given back after success only: until then it may be in use."""
    try:
        return _pool(backend).pop()
    except IndexError:  # asked first, another thread could take the last one meanwhile
        return backend.empty((BUCKET_NBYTES,), "uint8")


def as_dtype(memory: np.ndarray, dtype: str) -> Any:
    """Bytes as elements of `dtype`: an array of NumPy, or of torch if NumPy lacks the type."""
    try:
        return memory.view(np.dtype(dtype))
    except TypeError:  # NumPy has no bfloat16 of its own; then the leaves come from torch
        torch = sys.modules["torch"]
        return torch.from_numpy(memory).view(getattr(torch, dtype))


def bump_versions(written: Iterable[Any]) -> None:
    """Tell torch's autograd which tensors were written behind its back: it can then refuse to use them."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.autograd.graph.increment_version([x for x in written if isinstance(x, torch.Tensor)])

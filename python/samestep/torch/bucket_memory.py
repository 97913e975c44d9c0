"""Moves DistributedDataParallel's buckets to memory that all ranks of the host can map, if possible.

Reductions of such memory need no copies. torch allocates buckets itself. But `Tensor.share_memory_` moves the storage
of a tensor to shared memory, page-aligned, and it stays there. The pages at that address are then replaced by those of
a block of the group's heap.

A bucket is moved at its first reduction, when only torch has its address.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, NamedTuple

import torch

from samestep import _core

__all__ = ["MIN_PLACED_NBYTES", "BucketMemory"]

MIN_PLACED_NBYTES = 64 << 10
_SPARE = (
    4  # /dev/shm, which torch uses meanwhile, must have room for this many times the bucket, for each rank
)


class _Placed(NamedTuple):
    weak: Any  # torch's weak reference to the storage: while it exists no other storage gets its address
    block: Any
    tensor: torch.Tensor  # the same elements, at the block's own address


_placed: dict[int, _Placed] = {}
"""By storage. A block is released when its storage is freed, even long after the group has ended."""


class BucketMemory:
    """Where one group reduces buckets.

    Args:
      comm: the group.
    """

    def __init__(self, comm: _core.Communicator) -> None:
        self._comm = comm
        self._seen: dict[int, _Placed] = {}  # storages that are not moved

    def __call__(self, bucket: torch.Tensor) -> torch.Tensor:
        """The elements of `bucket` where their reduction is fastest; the bucket itself if it is not moved."""
        if bucket.nbytes < MIN_PLACED_NBYTES or not _called_by_reducer():
            return bucket
        storage = bucket.untyped_storage()
        number = storage._cdata
        if number not in _placed and number not in self._seen:
            _forget_ended(_placed)
            _forget_ended(self._seen)
            placed = self._move(bucket, storage)
            if placed is None:
                self._seen[number] = _Placed(storage._weak_ref(), None, torch.empty(0))
            else:
                _placed[number] = placed
        return _placed[number].tensor if number in _placed else bucket

    def _move(self, bucket: torch.Tensor, storage: Any) -> _Placed | None:
        alone = storage.nbytes() == bucket.nbytes and bucket.is_contiguous() and not storage.is_shared()
        has_heap = _core.shared_usage(self._comm) is not None
        if not alone or not has_heap or not _fits_into_shm(bucket.nbytes * self._comm.size):
            return None
        block = _core.allocate_shared(self._comm, bucket.nbytes)
        if block is None:
            return None
        twin = torch.frombuffer(block, dtype=bucket.dtype)[: bucket.numel()]
        twin.copy_(bucket)
        descriptor, _ = storage._share_fd_cpu_()
        if not _core.alias_pages_at(self._comm, block, bucket.data_ptr()):
            return None
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)  # the pages that were there before are unmapped
        return _Placed(storage._weak_ref(), block, twin)


def _forget_ended(known: dict[int, _Placed]) -> None:
    for number, placed in list(known.items()):
        # Freed once, by the thread that takes it out.
        if torch.UntypedStorage._expired(placed.weak) and known.pop(number, None) is placed:
            torch.UntypedStorage._free_weak_ref(placed.weak)


def _called_by_reducer() -> bool:
    """Whether the caller is C++ in a backward pass: then there is no Python frame between it and the collective."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("samestep.torch."):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_globals.get("__name__") == "torch.autograd.graph"


def _fits_into_shm(nbytes: int) -> bool:
    try:
        facts = os.statvfs("/dev/shm")
    except OSError:
        return False
    return facts.f_bavail * facts.f_frsize > _SPARE * nbytes

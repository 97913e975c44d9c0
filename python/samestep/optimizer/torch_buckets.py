"""Where the gradients of torch parameters are reduced: in flat buffers of which `.grad` is a view, or in place."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from samestep import _core, arrays
from samestep.errors import InvalidArgumentError
from samestep.group.work import Work
from samestep.reduce_ops import resolve
from samestep.trees.fusion import leaves_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from samestep.arrays import ArrayInfo
    from samestep.group.group import Group

NCCL_NBYTES = 25 << 20  # as in torch's DistributedDataParallel


class Slot:
    """One parameter: where its gradient is reduced, and what happened to it in this pass.

    Parameters hold their averager by a hook, which autograd keeps where Python's garbage collector does not
    look. So nothing that an averager holds may hold a parameter.
    """

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        self._parameter = weakref.ref(parameter)
        self.name = name
        self.info = arrays.info(parameter)
        self.device = parameter.device
        # The layout that autograd gives gradients: the parameter's own if it is dense.
        self.layout = torch.empty_like(parameter, device="meta")
        self.view: torch.Tensor | None = None  # into a bucket; None for a gradient reduced where it lies
        self.reduced: torch.Tensor | None = None  # what is reduced in this pass
        self.dirty = parameter.grad is not None  # has a gradient that other ranks have not seen
        self.kept: torch.Tensor | None = None  # a gradient that was complete before this pass

    def gather(self) -> None:
        """Bring this rank's contribution, zeros if there is none, to where it is reduced."""
        parameter = self._parameter()
        grad = parameter.grad if parameter is not None else None
        if grad is not None and grad.layout is not torch.strided:
            raise InvalidArgumentError(
                f"DistributedOptimizer: the gradient of {self.name} is sparse ({grad.layout}); only "
                "dense ones can be averaged, e.g. Embedding(..., sparse=False)"
            )
        self.kept = None if grad is None or self.dirty else grad.clone()
        reduced = grad if self.view is None else self.view
        if reduced is None or reduced.stride() != self.layout.stride():
            reduced = torch.empty_like(self.layout, device=self.device)
        if grad is None:
            reduced.zero_()
        elif parameter is not None and reduced.data_ptr() != grad.data_ptr():
            reduced.copy_(grad)
            parameter.grad = reduced
        self.reduced = reduced

    def write_back(self, used: bool) -> None:
        """Take the reduced gradient, unless no rank had one."""
        assert self.reduced is not None
        parameter = self._parameter()
        if used and parameter is not None:
            parameter.grad = self.reduced
        elif self.kept is not None:
            self.reduced.copy_(self.kept)
        self.reduced, self.dirty, self.kept = None, False, None


class Bucket:
    """Gradients reduced in one operation: views of one flat buffer, or without one where they lie.

    Several without a buffer are in device memory, and NCCL takes them in one group.
    """

    def __init__(self, slots: list[Slot], flat: torch.Tensor | None = None) -> None:
        self.slots = slots
        self.missing = len(slots)  # gradients that this pass has not yet completed
        self._flat = flat
        self._works: list[Work[Any]] = []
        start = 0
        for slot in slots:
            if flat is not None:
                slot.view = flat.as_strided(slot.layout.shape, slot.layout.stride(), start)
                start += slot.layout.numel()
        self.tail = flat[start:] if flat is not None else None

    @property
    def started(self) -> bool:
        """Whether the reduction is in progress."""
        return bool(self._works)

    def start(self, backend: Group, op: Any) -> None:
        """Start the reduction of what the slots hold now."""
        for slot in self.slots:
            if slot.reduced is None:
                slot.gather()
        names = [slot.name for slot in self.slots]
        what = f"gradients of {leaves_text(names)}" if names else "flags"
        with _core.UserCall(f"DistributedOptimizer: {what}"):
            grads = [self._flat] if self._flat is not None else list(map(_as_row, self.slots))
            # A parameter may want gradients of another dtype than its own, by which the plan has been made.
            if len(grads) > 1 and all(map(_has_own_dtype, self.slots)):
                inner = _core.allreduce_many(backend._comm, grads, grads, *resolve(op))
                self._works = [Work(inner, backend.timeout)]
            else:
                self._works = [backend.iallreduce(grad, op) for grad in grads]

    def finish(self) -> None:
        """Wait for the reduction."""
        works, self._works = self._works, []
        for work in works:
            work.wait()


def _has_own_dtype(slot: Slot) -> bool:
    return slot.reduced is not None and slot.reduced.dtype == slot.layout.dtype


def _as_row(slot: Slot) -> torch.Tensor:
    reduced = slot.reduced
    assert reduced is not None
    return reduced.as_strided((reduced.numel(),), (1,))  # dense, in whatever order the axes lie


def reduced_by_nccl(backend: Group, infos: Sequence[ArrayInfo], op: Any) -> Callable[[int], bool]:
    """Tells for each gradient whether NCCL reduces it where it lies; the same on all ranks."""
    if all(info.device == "cpu" for info in infos) or not _core.has_nccl(backend._comm):
        return lambda _: False
    code, _ = resolve(op)
    return lambda i: infos[i].device != "cpu" and _core.nccl_reduces(infos[i].dtype, code)


def join_for_nccl(
    messages: list[list[int]], infos: Sequence[ArrayInfo], takes: Callable[[int], bool]
) -> list[list[int]]:
    """Lets gradients that would be alone in their messages share operations of NCCL. Pure.

    Args:
      messages: indices of gradients, in the order in which the messages are complete.
      infos: the gradients.
      takes: whether NCCL reduces a gradient where it lies.

    Returns:
      The messages, in order; up to `NCCL_NBYTES` together.
    """
    joined: list[list[int]] = []
    shared: dict[str, list[int]] = {}  # the message of each dtype that still takes more
    for message in messages:
        first = infos[message[0]]
        if len(message) > 1 or not takes(message[0]):
            joined.append(message)
            continue
        others = shared.get(first.dtype, [])
        if others and sum(infos[i].nbytes for i in others) + first.nbytes <= NCCL_NBYTES:
            others += message
        else:
            shared[first.dtype] = list(message)
            joined.append(shared[first.dtype])
    return sorted(joined, key=lambda message: message[-1])


def flat_memory(backend: Group, slots: list[Slot], n_extra: int) -> torch.Tensor:
    """A buffer for the gradients of `slots`, which are of one dtype, and `n_extra` more elements."""
    dtype = slots[0].layout.dtype if slots else torch.float32
    count = sum(slot.layout.numel() for slot in slots) + n_extra
    if slots and slots[0].device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=slots[0].device)
    return torch.from_numpy(backend.empty((count * dtype.itemsize,), "uint8")).view(dtype)

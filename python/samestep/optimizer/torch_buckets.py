"""Where the gradients of torch parameters are reduced: in flat buffers of which `.grad` is a view, or in place."""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Any, NoReturn, cast

import torch

from samestep import _core, arrays
from samestep.errors import InvalidArgumentError
from samestep.group.group import Group
from samestep.group.work import Work
from samestep.optimizer.torch_state import as_row, gradient_dtype
from samestep.trees.fusion import leaves_text


class Slot:
    """One parameter: where its gradient is reduced, and what happened to it in this pass.

    Parameters hold their averager by a hook, which autograd keeps where Python's garbage collector does not
    look. So nothing that an averager holds may hold a parameter.
    """

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        self._parameter = weakref.ref(parameter)
        self.name = name
        self.reduced: torch.Tensor | None = None  # what is reduced in this pass
        self._given: torch.Tensor | None = None  # the `.grad` that has the memory of `reduced`
        self.dirty = parameter.grad is not None  # has a gradient that other ranks have not seen
        self.kept: torch.Tensor | None = None  # a gradient that was complete before this pass
        self.task = -1  # the backward pass in which autograd has named it last
        self.bucket = -1  # index of its bucket; -1: an empty parameter has none
        self.step = -1  # whose gradient has been averaged last
        self.holds_result = False  # when autograd was about to add this pass's gradient to `.grad`
        self._left = 0  # the address of the result that the last pass has left in `.grad`
        self.describe()

    def describe(self) -> None:
        """Look at the parameter, at first and after a conversion such as `model.double()`."""
        parameter = self._parameter()
        assert parameter is not None
        self._kind, self._address = _kind(parameter), parameter.data_ptr()
        self.device = parameter.device
        # The layout that autograd gives gradients: the parameter's own if it is dense.
        self.layout = torch.empty_like(parameter, device="meta", dtype=gradient_dtype(parameter))
        same = self.layout.dtype == parameter.dtype
        self._dtype, self._shape = self.layout.dtype, self.layout.shape
        self.info = arrays.info(parameter if same else torch.empty_like(self.layout, device=self.device))
        # Into a bucket; None for a gradient reduced where it lies. Users never get this very tensor, since a
        # tensor can be given other memory.
        self.view: torch.Tensor | None = None

    def is_converted(self) -> bool:
        """Whether the parameter is another one than described, e.g. after `model.double()`."""
        parameter = self._parameter()
        if parameter is None:
            return False
        address, kind = parameter.data_ptr(), self._kind
        if (
            address == self._address
            and parameter.dtype is kind[1]
            and parameter.shape == kind[2]
            and gradient_dtype(parameter) is kind[0]
        ):
            return False
        self._address = address
        return _kind(parameter) != self._kind

    def look_at_result(self) -> None:
        """Find out whether `.grad` still holds what an earlier pass has reduced, and no zeros."""
        parameter = self._parameter()
        grad = parameter.grad if parameter is not None else None
        self.holds_result = (
            grad is not None and not self.dirty and grad.data_ptr() == self._left and bool(grad.any())
        )

    def has_left(self, grad: torch.Tensor | None) -> bool:
        """Whether `grad` is what the last pass has averaged, where it lies."""
        return grad is not None and grad.data_ptr() == self._left

    def is_gathered(self) -> bool:
        """Whether the parameter's gradient still is what `gather` has left."""
        parameter, given, reduced = self._parameter(), self._given, self.reduced
        # The same tensor may have other memory, after `p.grad.data = ...`.
        return (
            given is not None
            and reduced is not None
            and parameter is not None
            and parameter.grad is given
            and given.is_set_to(reduced)
        )

    def take(self, buffers: Container[int]) -> torch.Tensor | None:
        """Decide where this rank's contribution is reduced. Returns the gradient, if it has to be copied there.

        `buffers`: addresses of the memory of all buckets.
        """
        parameter, view = self._parameter(), self.view
        grad = parameter.grad if parameter is not None else None
        if grad is None or parameter is None:
            self.kept = self._given = None
            self.reduced = torch.empty_like(self.layout, device=self.device) if view is None else view
            self.reduced.zero_()
            return None
        if grad.layout is not torch.strided or grad.dtype is not self._dtype or grad.shape != self._shape:
            self._refuse(grad)
        self.kept = None if self.dirty else grad.clone()
        self._given = grad
        if view is None:
            if grad.stride() == self.layout.stride() and not grad.is_conj() and not grad.is_neg():
                self.reduced = grad.detach()
                return None
            view = torch.empty_like(self.layout, device=self.device)
        elif grad.untyped_storage().data_ptr() in buffers:
            if not grad.is_set_to(view):
                raise InvalidArgumentError(
                    f"DistributedOptimizer: the gradient of {self.name} is a view of memory in which gradients are "
                    "reduced; assign a copy, p.grad = g.clone()"
                )
            self.reduced = view
            return None
        self.reduced = view
        self._given = parameter.grad = view.detach()
        return grad

    def gather(self, buffers: Container[int]) -> None:
        """Bring this rank's contribution, zeros if there is none, to where it is reduced."""
        grad = self.take(buffers)
        if grad is not None:
            cast(torch.Tensor, self.reduced).copy_(grad)

    def _refuse(self, grad: torch.Tensor) -> NoReturn:
        if grad.layout is not torch.strided:
            raise InvalidArgumentError(
                f"DistributedOptimizer: the gradient of {self.name} is sparse ({grad.layout}); only "
                "dense ones can be averaged, e.g. Embedding(..., sparse=False)"
            )
        raise InvalidArgumentError(
            f"DistributedOptimizer: the gradient of {self.name} is {_text(grad)}, where ranks have agreed on "
            f"{_text(self.layout)}; give p.grad the dtype and shape of p, or set p.grad_dtype"
        )

    def write_back(self, used: bool, step: int, *, is_there: bool) -> None:
        """Take the reduced gradient of a step, unless no rank had one; `is_there`: nobody has replaced it since."""
        if used:
            self.step = step
            parameter = self._parameter()
            if (
                not (is_there and self._given is not None)
                and parameter is not None
                and not self.is_gathered()
            ):
                assert self.reduced is not None
                parameter.grad = self.reduced.detach()
            self._left = self.reduced.data_ptr() if self.reduced is not None else 0
        elif self.kept is not None:
            assert self.reduced is not None
            self.reduced.copy_(self.kept)
        self.reduced = self._given = self.kept = None
        self.dirty = False


class Bucket:
    """Gradients reduced in one operation: views of one flat buffer, or one gradient where it lies."""

    def __init__(self, slots: list[Slot], flat: torch.Tensor | None = None) -> None:
        self.slots = slots
        self.missing = len(slots)  # gradients that this pass has not yet completed
        self._flat = flat
        self.is_on_host = bool(slots) and slots[0].device.type == "cpu"
        self._work: Work[Any] | None = None
        what = f"gradients of {leaves_text([slot.name for slot in slots])}" if slots else "flags"
        self._act = f"DistributedOptimizer: {what}"
        start = 0
        for slot in slots:
            if flat is not None:
                slot.view = flat.as_strided(slot.layout.shape, slot.layout.stride(), start)
                start += slot.layout.numel()
        self.tail = flat[start:] if flat is not None else None

    @property
    def started(self) -> bool:
        """Whether the reduction is in progress."""
        return self._work is not None

    @property
    def address(self) -> int:
        """Of the flat buffer; 0 without one."""
        return 0 if self._flat is None else self._flat.untyped_storage().data_ptr()

    def start(
        self, backend: Group, op: Any, buffers: Container[int], n_steps: int, has_other_settings: bool
    ) -> None:
        """Start the reduction of what the slots hold now; `buffers` as for `Slot.take`.

        What happened since the last reduction is compared without a message of its own: by further dimensions.
        """
        if self.is_on_host:
            for slot in self.slots:
                if not slot.is_gathered():  # unused, or a hook of the user's has replaced it
                    slot.gather(buffers)
        else:
            self._gather_at_once(buffers)
        what = "" if n_steps == 1 else f", {n_steps} step() since the last backward()"
        what += ", with other settings or a loaded state of the optimizer" if has_other_settings else ""
        n_more = (1, 0, 2)[min(n_steps, 2)] + 3 * has_other_settings
        with _core.UserCall(self._act + what):
            grad = as_row(cast(torch.Tensor, self.slots[0].reduced)) if self._flat is None else self._flat
            if n_more:
                grad = grad.view(*[1] * n_more, grad.numel())
            self._work = backend.iallreduce(grad, op)

    def _gather_at_once(self, buffers: Container[int]) -> None:
        to: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        try:
            for slot in self.slots:
                grad = slot.take(buffers)
                if grad is not None:
                    to.append(cast(torch.Tensor, slot.reduced))
                    grads.append(grad)
        finally:  # also if one is refused: `.grad` of those before it is where they are copied
            if grads:
                _copy_all(to, grads)

    def finish(self) -> None:
        """Wait for the reduction."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


def _copy_each(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for target, value in zip(to, values, strict=True):
        target.copy_(value)


# On a device one kernel for many; under a private name that torch's own FSDP uses, too.
_copy_all = getattr(torch, "_foreach_copy_", _copy_each)


def _kind(parameter: torch.Tensor) -> tuple[Any, ...]:
    return gradient_dtype(parameter), parameter.dtype, parameter.shape, parameter.device, parameter.stride()


def _text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}"


def flat_memory(backend: Group, slots: list[Slot], n_extra: int) -> torch.Tensor:
    """A buffer for the gradients of `slots`, which are of one dtype, and `n_extra` more elements."""
    dtype = slots[0].layout.dtype if slots else torch.float32
    count = sum(slot.layout.numel() for slot in slots) + n_extra
    if slots and slots[0].device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=slots[0].device)
    return torch.from_numpy(backend.empty((count * dtype.itemsize,), "uint8")).view(dtype)

"""torch optimizers whose state is partitioned among the ranks; the optimizer object stays the same.

While `step` runs, each parameter in `param_groups` is replaced by a view of the elements that this rank owns, to which
the state belongs. Everything else, such as schedulers, `zero_grad` and clipping, sees the parameters themselves.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch

from samestep import _core
from samestep.errors import InvalidArgumentError
from samestep.group.group import Group
from samestep.optimizer.flat_exchange import FlatExchange, Partition
from samestep.optimizer.probe import part_shape
from samestep.optimizer.torch_sharded_state import gather, require_elementwise, slice_state
from samestep.optimizer.torch_shards import ShardedGradients
from samestep.optimizer.torch_state import Settings, as_row, named_parameters, require_plain
from samestep.reduce_ops import Premul, is_mean
from samestep.step.gradients import allreduce_tree
from samestep.step.state_hash import Verifier

_HOW = "call opt.average() before scaler.unscale_(opt) and scaler.step(opt), so that all ranks see the same gradients"
_ACT = "ShardedOptimizer"


def distribute(
    backend: Group,
    optimizer: torch.optim.Optimizer,
    op: Any,
    *,
    shards: int | None,
    elementwise: bool,
    copies: int,
) -> torch.optim.Optimizer:
    """Let `optimizer` update this rank's part of its parameters. Returns `optimizer`. No communication."""
    require_plain(optimizer, _ACT)
    if not elementwise:
        require_elementwise(optimizer)
    parts = _ShardedStep(backend, optimizer, op, shards)
    parts.copies = copies
    known: Any = optimizer
    known._samestep_parts = parts
    known.average = parts.average
    for name in ("step", "state_dict", "load_state_dict", "add_param_group"):
        setattr(known, name, types.MethodType(_through(name), weakref.proxy(optimizer)))
    known.__getstate__ = _refuse_copy
    known._step_supports_amp_scaling = True  # see `_unscale`
    if shards is not None:
        known.shard = parts.gradients.shard
    return optimizer


def _look_at_sum(
    parts: weakref.ref[_ShardedStep], parameter: weakref.ref[torch.Tensor], _: torch.Tensor
) -> None:
    """Whether `.grad` holds a sum over ranks, to which `backward` is about to add."""
    known, of = parts(), parameter()
    if known is not None and of is not None:
        known._is_onto_sum = of.grad is not None and bool(of.grad.any())


def _see_another_gradient(parts: weakref.ref[_ShardedStep], _: torch.Tensor) -> None:
    """A `backward` after `average`: `step` averages anew. The mean of a mean and of what is added is that of all."""
    known = parts()
    if known is None:
        return
    known._is_averaged = False
    if known._is_onto_sum:
        raise InvalidArgumentError(
            f"{_ACT}: backward() after opt.average() adds to the sum over ranks, which step() would sum up once more; "
            "call opt.zero_grad() between them, or average once, after the last backward()"
        )


def _through(name: str) -> Any:
    """A method of the optimizer that is one of its `_ShardedStep`."""

    def call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(optimizer._samestep_parts, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _refuse_copy() -> Any:
    raise InvalidArgumentError(f"{_ACT}: this optimizer cannot be copied or pickled; save its state_dict()")


class _ShardedStep:
    """The part of this rank: views of the parameters, their state, and the collectives around a step."""

    def __init__(self, backend: Group, optimizer: torch.optim.Optimizer, op: Any, shards: int | None) -> None:
        self._backend = backend
        self._optimizer = weakref.ref(optimizer)
        self._op = op
        self._inner = {
            name: getattr(type(optimizer), name)
            for name in ("step", "state_dict", "load_state_dict", "add_param_group")
        }
        self.gradients: Any = None if shards is None else ShardedGradients(backend, optimizer, shards)
        self._settings = Settings(backend, optimizer, _ACT, divides_state=True)
        self.copies = 1
        self._is_averaged = False
        self._is_onto_sum = False  # that `average` has left
        self._watches: list[Any] = []
        self._verifier = Verifier.wanted(backend, f"{_ACT}({type(optimizer).__name__})")
        self._divided: set[int] = set()  # by id: parameters that have been trained, which the optimizer keeps
        known = enumerate(named_parameters(optimizer).values())
        self.divide({i: dict(optimizer.state[p]) for i, p in known if p in optimizer.state})

    def _known(self) -> torch.optim.Optimizer:
        return cast(torch.optim.Optimizer, self._optimizer())

    def divide(self, whole: Mapping[int, dict[str, Any]]) -> None:
        """Plan the parts for the parameters that the optimizer has now, and keep this rank's part of their state.

        `whole`: the state by index of the parameter.
        """
        named = named_parameters(self._known())
        self._names, self.parameters = list(named), list(named.values())
        self._plan(self._trained_now())
        self.idle = {i: entries for i, entries in whole.items() if not self._trained[i]}
        state = self._known().state
        state.clear()
        state.update(
            {self._parts[i]: entries for i, entries in self.sliced(whole, self._backend.rank).items()}
        )

    def _plan(self, trained: list[bool]) -> None:
        self._trained = trained
        self._exchange = FlatExchange(self._backend, self.partition(self._backend.size), self._names)
        self._parts = [
            torch.nn.Parameter(p.new_empty(part_shape(p.shape, len(self._exchange.part(i)))))
            for i, p in enumerate(self.parameters)
        ]

    def partition(self, size: int) -> Partition:
        """The parts among `size` ranks."""
        kinds = [str(p.dtype)[6:] if t else None for p, t in zip(self.parameters, self._trained, strict=True)]
        return Partition([p.numel() for p in self.parameters], kinds, size)

    def sliced(self, whole: Mapping[int, dict[str, Any]], rank: int) -> dict[int, dict[str, Any]]:
        """The part of a rank of the state of whole parameters."""
        return {
            i: slice_state(entries, self.parameters[i], part)
            for i, entries in whole.items()
            if self._trained[i] and (part := self._exchange.partition.part(i, rank))
        }

    def _trained_now(self) -> list[bool]:
        """Which parameters a step may change: as in torch also frozen ones, if they have a gradient.

        Once divided they stay so: else ranks would have to be asked for gradients in each step.
        """
        self._divided |= {id(p) for p in self.parameters if p.requires_grad or p.grad is not None}
        return [id(p) in self._divided for p in self.parameters]

    def _divide_anew(self, change: Any = lambda: None) -> None:
        """Divide after the set of parameters has changed, which moves the parts. Collective."""
        whole = self._gathered_state()
        change()
        self.divide(whole)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Take in more parameters. Collective."""
        self._divide_anew(lambda: self._inner["add_param_group"](self._known(), group))

    # ---- a step

    def average(self) -> None:
        """Give all parameters the mean gradient on all ranks, e.g. to clip it before `step`. Collective."""
        if self.gradients is not None:
            self.gradients.average()
        elif self._op is not None:
            tree = {name: p.grad for name, p in zip(self._names, self.parameters, strict=True)}
            with _core.UserCall(f"{_ACT}.average()"):
                mean = allreduce_tree(self._backend, tree, self._op)
            for name, parameter in zip(self._names, self.parameters, strict=True):
                parameter.grad = mean[name]
            self._watch()
        self._is_averaged = True

    def _watch(self) -> None:
        """Learn of gradients that `backward` computes from now on until `step`."""
        self._stop_watching()
        myself = weakref.ref(self)
        for parameter in self.parameters:
            if parameter.requires_grad:
                seen = functools.partial(_see_another_gradient, myself)
                self._watches.append(parameter.register_post_accumulate_grad_hook(seen))
                if not is_mean(self._op):
                    before = functools.partial(_look_at_sum, myself, weakref.ref(parameter))
                    self._watches.append(parameter.register_hook(before))

    def _stop_watching(self) -> None:
        self._is_onto_sum = False
        while self._watches:
            self._watches.pop().remove()

    def step(self, closure: Any = None) -> Any:
        """One step: average, update this rank's part, and share it. Collective."""
        loss = None
        self._exchange.require_current()
        if self.gradients is None and self._settings.have_changed():
            self._settings.compare()
        self._stop_watching()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._trained != self._trained_now():
            self._divide_anew()
        if self._verifier is not None:
            self._verifier.before_step({"parameters": dict(zip(self._names, self.parameters, strict=True))})
        with torch.no_grad(), _core.UserCall(f"{_ACT}.step()"):
            if not self._unscale():
                self._is_averaged = False
                return loss
            self._set_gradients()
            try:
                with self._parts_in_groups():
                    self._inner["step"](self._known())
            finally:
                for part in self._parts:
                    part.grad = None
            self._share()
        return loss

    def _unscale(self) -> bool:
        """Divide mean gradients by the scale that a `torch.amp.GradScaler` asks for, if one calls. Collective then.

        A scaler skips the step of an ordinary optimizer where it has found an infinity in this rank's gradients, and
        the other ranks would pair their step with this rank's next one. Of an optimizer with
        `_step_supports_amp_scaling` it always calls `step`, and sets `found_inf` and `grad_scale` for the call.

        Returns:
          Whether to update: False, on all ranks, if the scaler has found an infinity.

        Raises:
          InvalidArgumentError: on all ranks: the gradients are not averaged yet, or were not when the scaler looked at
            them and found an infinity on some ranks only.
        """
        backend, optimizer = self._backend, cast(Any, self._known())
        found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if found is None:
            return True
        optimizer.found_inf = optimizer.grad_scale = (
            None  # for this step only; the scaler deletes the attributes
        )
        is_alike = self._op is None or (backend.size == 1 and self.gradients is None)
        act = f"{_ACT}.step()"
        if not (self._is_averaged or is_alike):
            raise InvalidArgumentError(f"{act} in group {backend.name}, called by a GradScaler: {_HOW}")
        mine = int(bool(found))
        with _core.UserCall(f"{act}, called by a GradScaler"):
            any_rank, no_rank = backend.allreduce(np.array([mine, -mine]), "max").tolist()
        if any_rank != -no_rank:
            raise InvalidArgumentError(
                f"{act} in group {backend.name}: a GradScaler found infinities on some ranks only; {_HOW}"
            )
        for parameter in self.parameters if scale is not None and not mine else ():
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        return not mine

    def _set_gradients(self) -> None:
        """Point the parts at the parameters as they lie now, and give them this rank's gradients."""
        if self.gradients is not None:
            self.gradients.before_step()
        split = [i for i, trained in enumerate(self._trained) if trained]
        held = {i: self._exchange.part(i) for i in split}
        flats = {i: _in_memory_order(self.parameters[i], self._names[i]) for i in split}
        for i, part in held.items():
            self._parts[i].data = flats[i][part.start : part.stop].view(self._parts[i].shape)
        grads = {i: _like_parameter(self.parameters[i], self._names[i]) for i in split}
        is_alone = self._backend.size == 1 and not isinstance(self._op, Premul)
        if self._is_averaged or self._op is None or self.gradients is not None or is_alone:
            if not is_alone:  # the parts are of equal elements only where these lie in the same order
                self._exchange.agreed_dtypes(
                    f"{_ACT}.step()", dict.fromkeys(split, "None"), self._layouts(split)
                )
            own = {i: g[held[i].start : held[i].stop] for i, g in grads.items() if g is not None}
        else:
            own = self._reduced(grads)
        self._is_averaged = False
        for i, grad in own.items():
            if self._parts[i].numel():
                self._parts[i].grad = grad.view(self._parts[i].shape)

    def _layouts(self, split: Iterable[int]) -> list[tuple[str, str]]:
        """How the elements of parameters lie: each rank updates those that come next there, whichever they are."""
        named = [(f"{self._names[i]} in memory", self.parameters[i]) for i in split]
        return [
            (name, "row-major" if p.is_contiguous() else f"with strides {p.stride()}") for name, p in named
        ]

    def _reduced(self, grads: dict[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
        kinds = {
            i: "None" if g is None else f"{str(g.dtype)[6:]} {tuple(self.parameters[i].shape)}"
            for i, g in grads.items()
        }
        dtypes = self._exchange.agreed_dtypes(f"{_ACT}.step()", kinds, self._layouts(grads))
        own = self._exchange.reduce_scatter(grads, dtypes, self._op)
        return {
            i: torch.from_numpy(data).view(getattr(torch, dtypes[i])).to(self.parameters[i].device)
            for i, data in own.items()
            if len(data)
        }

    def _share(self) -> None:
        """Give every rank all elements of the parameters."""
        if self._backend.size == 1:  # the part is the whole, and a view of it
            return
        parts = {i: part.detach() for i, part in enumerate(self._parts) if self._trained[i]}
        for i, data in self._exchange.allgather(parts).items():
            if len(data):
                _core.unpack(data, [_in_memory_order(self.parameters[i], self._names[i])])
        torch.autograd.graph.increment_version(
            [p for p, trained in zip(self.parameters, self._trained, strict=True) if trained]
        )

    @contextlib.contextmanager
    def _parts_in_groups(self) -> Iterator[None]:
        optimizer = self._known()
        parts = iter(self._parts)
        for group in optimizer.param_groups:
            group["params"] = [next(parts) for _ in group["params"]]
        try:
            yield
        finally:
            parameters = iter(self.parameters)  # `load_state_dict` makes new groups
            for group in optimizer.param_groups:
                group["params"] = [next(parameters) for _ in group["params"]]

    # ---- checkpoints

    def _gathered_state(self, root: int | None = None) -> dict[int, dict[str, Any]]:
        whole = gather(
            self._backend, self._exchange, self.parameters, self._parts, self.part_state(), root=root
        )
        return dict(sorted({**whole, **self.idle}.items()))

    def state_dict(self, *, root: int | None = None) -> dict[str, Any] | None:
        """What the unsharded optimizer returns, on all ranks or on `root`, None elsewhere. Collective."""
        whole = self._gathered_state(root)
        if root is not None and self._backend.rank != root:
            return None
        return {**self._inner_state(), "state": whole}

    def _inner_state(self) -> dict[str, Any]:
        with self._parts_in_groups():
            return cast(dict[str, Any], self._inner["state_dict"](self._known()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of what the unsharded optimizer, or `state_dict` on any number of ranks, returned."""
        self.load_part(self.part_of(state_dict))

    # ---- the part of this rank, as a `TrainState` keeps it

    def part_state(self) -> dict[int, dict[str, Any]]:
        """The state of this rank's parts, by index of the parameter."""
        state = self._known().state
        return {i: state[part] for i, part in enumerate(self._parts) if part in state}

    def part_dict(self) -> dict[str, Any]:
        """What `load_part` takes. No communication."""
        return {
            **self._inner_state(),
            "state": self.part_state(),
            "idle": self.idle,
            "trained": self._trained,
        }

    def part_of(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of what `state_dict` returned."""
        whole = state_dict["state"]
        idle = {i: entries for i, entries in whole.items() if not self._trained[i]}
        own = self.sliced(whole, self._backend.rank)
        return {**state_dict, "state": own, "idle": idle, "trained": self._trained}

    def load_part(self, part: dict[str, Any]) -> None:
        """Take what `part_dict` returned here, or another rank's with this one's "state"."""
        self.idle = part["idle"]
        if part["trained"] != self._trained:
            self._divided |= {id(p) for p, t in zip(self.parameters, part["trained"], strict=True) if t}
            self._plan(part["trained"])
        with self._parts_in_groups():
            self._inner["load_state_dict"](
                self._known(), {key: of for key, of in part.items() if key not in ("idle", "trained")}
            )


def _in_memory_order(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """All elements as one axis, in the order in which they lie; a view."""
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        raise InvalidArgumentError(f"{_ACT}: {name} has gaps or repeats in memory; pass p.contiguous()")
    return as_row(tensor.detach())


def _like_parameter(parameter: torch.Tensor, name: str) -> torch.Tensor | None:
    """The gradient, flat, in the order in which the elements of the parameter lie."""
    grad = parameter.grad
    if grad is None:
        return None
    if grad.layout is not torch.strided:
        raise InvalidArgumentError(f"{_ACT}: the gradient of {name} is sparse ({grad.layout})")
    if grad.stride() != parameter.stride():
        grad = torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)
    return _in_memory_order(grad, f"the gradient of {name}")

"""torch optimizers: gradients are averaged at the end of `backward()`; the optimizer object stays the same.

Each parameter has a hook that runs when its gradient is complete. Gradients move into a flat buffer, of which
`.grad` becomes a view, so that nothing needs to be copied out after the reduction: on the host within the hook,
on a device by one kernel for a bucket once all of it is complete. Large gradients are reduced where they lie.
Buckets are started in one fixed order (that of the last parameters first, as backward produces them), and a
callback of the autograd engine at the end of the pass starts the others and waits for all.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from samestep import _core
from samestep.errors import InvalidArgumentError, MismatchError, StepError, UnavailableError
from samestep.group.group import Group
from samestep.optimizer.torch_buckets import Bucket, Slot, flat_memory
from samestep.optimizer.torch_state import Settings, named_parameters, require_plain, require_same, state_of
from samestep.reduce_ops import PREMUL, ReduceOp, is_mean, resolve
from samestep.step.state_hash import Verifier, same
from samestep.step.together import note_reduced
from samestep.trees.allreduce import op_name
from samestep.trees.fusion import plan_messages

_BY_HAND = (
    "; no backward() has averaged this gradient for this step: it was set or replaced by hand, computed within "
    "no_sync, or its parameter was not added by add_param_group; give all ranks the same, e.g. by "
    "allreduce_gradients(backend, grads)"
)

# Who averages a parameter: the newest optimizer made distributed, e.g. when a notebook cell has run again.
_owners: dict[int, tuple[weakref.ref[torch.Tensor], list[Any], weakref.ref[Averager]]] = {}


def distribute(backend: Group, optimizer: torch.optim.Optimizer, op: Any) -> torch.optim.Optimizer:
    """Average the gradients of `optimizer`'s parameters at the end of every backward pass. Returns `optimizer`.

    From now on that belongs to the parameters, until another optimizer is made distributed over them.
    Parameters added later by `add_param_group`, or unfrozen later, are taken in. A parameter that no rank
    used keeps the gradient it has (None after `zero_grad`). Copies (`copy.deepcopy`, `pickle`) are plain
    optimizers again, with parameters of their own.

    A gradient kept from one step is overwritten by the next backward: clone it. All ranks may convert parameters
    (`model.double()`) between passes. Adding up gradients over several passes needs `no_sync` if `op` is not AVG;
    without it `backward` raises InvalidArgumentError.
    """
    if resolve(op, "DistributedOptimizer")[0] not in (ReduceOp.AVG.value, ReduceOp.SUM.value, PREMUL):
        raise InvalidArgumentError(
            f"DistributedOptimizer: gradients can be combined by AVG, SUM or premul, not {op}"
        )
    require_plain(optimizer, "DistributedOptimizer", but="_samestep_averager")
    averager = Averager(backend, optimizer, op)
    add_param_group = type(optimizer).add_param_group
    myself = weakref.ref(optimizer)

    def add_and_take_in(param_group: dict[str, Any]) -> None:
        add_param_group(cast(torch.optim.Optimizer, myself()), param_group)
        averager.refresh_parameters()

    optimizer.add_param_group = add_and_take_in
    optimizer.register_step_pre_hook(averager.before_step)
    verifier = Verifier.wanted(backend, f"DistributedOptimizer({type(optimizer).__name__})")
    if verifier is not None:
        optimizer.register_step_pre_hook(lambda opt, *_: verifier.before_step(state_of(opt)))
    optimizer._samestep_averager = averager
    return optimizer


@contextlib.contextmanager
def no_sync(optimizer: Any) -> Iterator[None]:
    """See `samestep.optimizer.no_sync`."""
    averager = getattr(optimizer, "_samestep_averager", None)
    if averager is None:
        raise InvalidArgumentError(
            f"no_sync: this {type(optimizer).__name__} averages nothing; pass what "
            "DistributedOptimizer returned for a torch optimizer"
        )
    before, averager.paused = averager.paused, True
    try:
        yield
    finally:
        averager.paused = before


class _Pass:
    """Called by autograd at the end of a backward pass. Lives as long as that: one that raised drops it."""

    def __init__(self, averager: Averager) -> None:
        self.averager = averager
        self.task = _graph_task()

    def __call__(self) -> None:
        self.averager.finish()


class Averager:
    """The hooks and buckets of one optimizer."""

    def __init__(self, backend: Group, optimizer: torch.optim.Optimizer, op: Any) -> None:
        self.paused = False
        self._backend = backend
        self._optimizer = weakref.ref(optimizer)
        self._settings, self._has_other_settings = Settings(backend, optimizer, "DistributedOptimizer"), False
        self._op = op
        self.is_mean = is_mean(op)
        self._slots: dict[int, Slot] = {}  # by id of the parameter
        self._frozen: list[weakref.ref[torch.Tensor]] = []
        self._buckets: list[Bucket] = []
        self._buffers: set[int] = set()  # addresses of their memory
        self._n_started = 0
        self._newest: tuple[Bucket, bool] | None = None  # whether its newest gradient is complete
        self._pass: weakref.ref[_Pass] | None = None
        self._has_looked = False  # at the other parameters of modules
        self._is_amid = False  # a pass has begun whose mean gradients are not there yet
        self._n_steps = 0
        self._n_since = 0
        """Steps that have changed parameters since the last pass that averaged; on all ranks the same."""
        backend._follow(self, Averager._begin_with_newcomers)
        self.refresh_parameters()

    def refresh_parameters(self) -> None:
        """Hook and plan for all parameters that the optimizer has now. Collective."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        named = named_parameters(optimizer)
        require_same(
            self._backend,
            f"DistributedOptimizer({type(optimizer).__name__}, op={op_name(self._op, 'DistributedOptimizer')})",
            named,
        )
        for parameter in named.values():
            _claim(parameter, self)
        self._frozen = [weakref.ref(p) for p in named.values() if not p.requires_grad]
        old = self._slots
        for slot in old.values():
            if slot.is_converted():
                slot.describe()
        self._slots = {
            id(p): old.get(id(p)) or Slot(p, name)
            for name, p in named.items()
            if p.requires_grad or id(p) in old
        }
        self._buckets = []

    def _begin_with_newcomers(self, _: Group) -> None:
        self._n_since = 0  # as on ranks that come in

    def forget(self, parameter: torch.Tensor) -> None:
        """Another optimizer has taken over `parameter`."""
        self._slots.pop(id(parameter), None)
        self._frozen = [frozen for frozen in self._frozen if frozen() is not parameter]
        self._buckets = []

    def _plan(self) -> None:
        """Cut the parameters, last first, into buckets. The last has a tail of flags, one per parameter."""
        slots = list(reversed(self._slots.values()))
        for slot in slots:
            slot.bucket = -1
        infos = [slot.info for slot in slots]
        messages = plan_messages(infos, mix_dtypes=False, with_nccl=_core.has_nccl(self._backend._comm))
        flat = [message for message in messages if len(message) > 1]
        tail = flat[-1:] or [[]]
        messages = [message for message in messages if message not in tail]
        for message in [*messages, *tail]:
            members = [slots[i] for i in message]
            last = message is tail[0]
            for slot in members:
                slot.view = slot.reduced = None
                slot.bucket = len(self._buckets)
            n_flags = sum(map(len, [*messages, *tail])) if last else 0
            memory = flat_memory(self._backend, members, n_flags) if last or message in flat else None
            self._buckets.append(Bucket(members, memory))

    def about_to_add(self, parameter: weakref.ref[torch.Tensor], _: torch.Tensor) -> None:
        """Autograd has a gradient of this pass, which `backward` then adds to `parameter.grad`."""
        slot = self._slots.get(id(parameter()))
        if slot is not None:
            slot.look_at_result()

    def ready(self, parameter: torch.Tensor) -> None:
        """Autograd has added this pass's gradient to `parameter.grad`."""
        slot = self._slots.get(id(parameter))
        if slot is not None and slot.holds_result:
            raise InvalidArgumentError(
                f"DistributedOptimizer(op={op_name(self._op, 'DistributedOptimizer')}): {slot.name} has the sum over "
                "ranks of an earlier backward(), which this one would sum up once more; call zero_grad() between "
                "steps, and within a step all backward() but the last in no_sync(opt); a layer in several checkpoints, "
                "each of which is a backward() of its own, needs use_reentrant=False"
            )
        if self.paused:
            if id(parameter) in self._slots:  # else just unfrozen: taken in by the next pass that averages
                self._slots[id(parameter)].dirty = True
            return
        if torch.is_grad_enabled():  # what autograd sets within a pass that builds a graph, and only there
            raise UnavailableError(
                "DistributedOptimizer: backward(create_graph=True): mean gradients carry no graph, so nothing could be "
                "differentiated through p.grad; take gradients for a penalty from torch.autograd.grad(loss, "
                "parameters, create_graph=True), add it to the loss, and call backward() without create_graph"
            )
        task = ((self._pass and self._pass()) or self._begin()).task
        if self._newest is not None:
            self._settle(*self._newest)
        slot = self._slots[id(parameter)]
        if slot.bucket < 0:
            return
        bucket = self._buckets[slot.bucket]
        if bucket.started:
            raise InvalidArgumentError(
                f"DistributedOptimizer: {slot.name} got a second gradient in one backward pass, when "
                "the first was already sent: it is used both inside and outside of checkpoint(..., "
                "use_reentrant=True); pass use_reentrant=False"
            )
        # Within a reentrant checkpoint, a pass inside the pass, more may follow: then wait for the end.
        self._newest = bucket, task == _graph_task() and slot.task != task
        slot.task, slot.dirty = task, True
        if bucket.is_on_host:  # now, while it is in the cache; of a device all of a bucket at once
            slot.gather(self._buffers)

    def _settle(self, bucket: Bucket, is_complete: bool) -> None:
        """Start what is complete, now that the other hooks of the newest gradient's parameter have run."""
        self._newest = None
        if not is_complete:
            return
        bucket.missing -= 1
        while bucket.missing == 0 and self._n_started < len(self._buckets) - 1:
            bucket = self._buckets[self._n_started]
            if bucket.missing == 0:
                self._start_next()

    def before_step(
        self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Let a step with a closure see the loss of all ranks, as a line search compares it. `args` begin with self."""
        self.require_mean()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self.paused or not callable(closure):
            return None
        combined = functools.partial(self._loss_of_all, closure)
        return (
            ((args[0], combined, *args[2:]), kwargs)
            if len(args) > 1
            else (args, {**kwargs, "closure": combined})
        )

    def _loss_of_all(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        is_tensor = isinstance(loss, torch.Tensor) and loss.numel() == 1
        if is_tensor:
            mine = loss.detach().clone()
        else:
            try:
                mine = torch.tensor(float(loss), dtype=torch.float64)  # as line searches take it
            except (TypeError, ValueError, RuntimeError):
                return loss  # such as None, which no optimizer compares
        with _core.UserCall("DistributedOptimizer: the loss that the closure returned"):
            found = self._backend.allreduce(mine, self._op)
        return found if is_tensor else found.item()

    def require_mean(self) -> None:
        """Refuse a step with this rank's own gradients: of a pass whose end never came, or set by hand."""
        if not self._has_looked:
            self._has_looked = True
            self._warn_of_others()
        if self._is_amid and not self.paused:
            raise UnavailableError(
                "DistributedOptimizer: step() after a backward() that did not average its gradients: it raised, or ran "
                "as compiled autograd, which tells nobody when it ends; call zero_grad(), and backward() without "
                "torch._dynamo.compiled_autograd (torch.compile of the model is fine)"
            )
        step, self._n_steps = self._n_steps, self._n_steps + 1
        if not self.paused and self._backend.size > 1:
            by_hand = self._not_averaged_in(step)
            if by_hand:
                same(self._backend, by_hand, act="DistributedOptimizer: step()", when=_BY_HAND)
            optimizer = self._optimizer()
            groups = [] if optimizer is None else optimizer.param_groups
            self._n_since += any(p.grad is not None for group in groups for p in group["params"])

    def _not_averaged_in(self, step: int) -> dict[str, torch.Tensor | None]:
        """All gradients, if this step uses one that is not what a pass has averaged for it."""
        optimizer = self._optimizer()
        parameters = [] if optimizer is None else [p for g in optimizer.param_groups for p in g["params"]]
        if all(self._is_averaged(p, step) for p in parameters):
            return {}
        return {f"parameter {i}": p.grad for i, p in enumerate(parameters)}

    def _is_averaged(self, parameter: torch.Tensor, step: int) -> bool:
        slot, grad = self._slots.get(id(parameter)), parameter.grad
        if slot is not None and slot.step == step and not slot.dirty:
            return slot.has_left(grad)
        return grad is None or (slot is None and _is_claimed(parameter))

    def _warn_of_others(self) -> None:
        """Warn of gradients that nobody averages, in synchronized modules that have parameters of this optimizer."""
        for module in self._backend._cache.get("modules", ()):
            named = dict(module.named_parameters())
            if any(id(p) in self._slots for p in named.values()):
                others = [n for n, p in named.items() if p.grad is not None and not _is_claimed(p)]
                if others:
                    warnings.warn(_text_of_others(others, module), stacklevel=4)

    def _begin(self) -> _Pass:
        for bucket in self._buckets:
            if bucket.started:  # left over from a pass that raised; all ranks had started it
                with contextlib.suppress(MismatchError, StepError):
                    bucket.finish()
        frozen = [parameter() for parameter in self._frozen]
        if any(parameter is not None and parameter.requires_grad for parameter in frozen) or any(
            slot.is_converted() for slot in self._slots.values()
        ):
            self.refresh_parameters()
        if not self._buckets:
            self._plan()
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)
        if self._is_amid:  # else `write_back` has done so
            for slot in self._slots.values():
                slot.reduced = None
        # Anew in each pass: `p.grad.share_memory_()` moves a whole buffer.
        self._buffers = {bucket.address for bucket in self._buckets}
        self._n_started, self._newest = 0, None
        self._has_other_settings = self._settings.have_changed()
        this_pass = _Pass(self)
        self._pass, self._is_amid = weakref.ref(this_pass), True
        _at_end_of_backward(this_pass)
        return this_pass

    def _start_next(self) -> None:
        self._buckets[self._n_started].start(
            self._backend, self._op, self._buffers, self._n_since, self._has_other_settings
        )
        self._n_started += 1

    @torch.no_grad()
    def finish(self) -> None:
        """The pass is over: reduce what is not yet in progress, wait, and give every parameter its gradient."""
        self._pass = None
        if self._newest is not None:
            self._settle(*self._newest)
        flags = self._buckets[-1].tail
        assert flags is not None
        slots = [slot for bucket in self._buckets for slot in bucket.slots]
        mine = [slot.dirty for slot in slots]
        # Infinite, so that no factor and no sum makes 0 of them, though perhaps NaN.
        if all(mine):
            flags.fill_(math.inf)
        else:
            flags.copy_(torch.tensor([math.inf if dirty else 0.0 for dirty in mine], dtype=flags.dtype))
        n_early = sum(len(bucket.slots) for bucket in self._buckets[: self._n_started])
        while self._n_started < len(self._buckets):
            self._start_next()
        try:
            for bucket in self._buckets:
                bucket.finish()
            if self._has_other_settings:
                self._settings.compare()
        except MismatchError:  # on all ranks: those that have made up for the difference go on
            self._n_since = 0
            self._settings.forget()
            raise
        # A gradient of this rank is one of any rank. To read the flags would wait for the device in every step.
        used = mine if all(mine) else [flag != 0 for flag in flags.tolist()]
        for i, (slot, any_rank) in enumerate(zip(slots, used, strict=True)):
            slot.write_back(any_rank, self._n_steps, is_there=i >= n_early)
        self._is_amid = False
        self._n_since = 0
        note_reduced()


def _text_of_others(names: list[str], module: torch.nn.Module) -> str:
    shown = ", ".join(names[:5]) + " ..." * (len(names) > 5)
    return (
        f"DistributedOptimizer: {shown} of {type(module).__name__} have gradients, but are in no distributed "
        "optimizer: these gradients differ between ranks, and so does clipping over all parameters; add them to the "
        "optimizer, or call requires_grad_(False)"
    )


def _is_claimed(parameter: torch.Tensor) -> bool:
    return id(parameter) in _owners and _owners[id(parameter)][0]() is parameter


def _claim(parameter: torch.Tensor, averager: Averager) -> None:
    """Let `averager` know of each gradient of `parameter`, and nobody else any more."""
    key = id(parameter)
    if _is_claimed(parameter):
        _, handles, owner = _owners[key]
        before = owner()
        if before is averager:
            return
        if before is not None:
            before.forget(parameter)
        for handle in handles:
            handle.remove()

    trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes hooks for such only; a frozen one may be unfrozen later
    handles = [parameter.register_post_accumulate_grad_hook(averager.ready)]
    if not averager.is_mean:  # the mean of a mean and of what is added to it is that of all
        look = functools.partial(averager.about_to_add, weakref.ref(parameter))
        handles.append(parameter.register_hook(look))
    parameter.requires_grad_(trained)
    forget = weakref.ref(parameter, lambda _: _owners.pop(key, None))
    _owners[key] = (forget, handles, weakref.ref(averager))


# The two things that torch offers only under private names; DistributedDataParallel and FSDP use the same.
_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # number of this thread's backward pass


def _at_end_of_backward(callback: Callable[[], None]) -> None:
    if torch.compiler.is_compiling():  # compiled autograd: it then runs this uncompiled, see `require_mean`
        raise UnavailableError("DistributedOptimizer: compiled autograd cannot average gradients")
    torch.autograd.Variable._execution_engine.queue_callback(callback)

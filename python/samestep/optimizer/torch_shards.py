"""torch optimizers whose gradients are added by shard: the same bits on any number of ranks, or exact weights."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from samestep.errors import InvalidArgumentError
from samestep.group.group import Group
from samestep.optimizer.torch_state import Settings, named_parameters, require_plain, state_of
from samestep.step.accumulator import Accumulator
from samestep.step.state_hash import Verifier, same

_REPLACED = "; it was replaced by hand after opt.average(): give all ranks the same"


def distribute(backend: Group, optimizer: torch.optim.Optimizer, shards: int | None) -> Any:
    """Give `optimizer` the methods `shard` and `average`, and let its `step` average first. Returns `optimizer`."""
    require_plain(optimizer, "DistributedOptimizer")
    gradients = ShardedGradients(backend, optimizer, shards)
    known: Any = optimizer
    known._samestep_shards = gradients
    known.shard, known.average = gradients.shard, gradients.average
    optimizer.register_step_pre_hook(functools.partial(_before_step, gradients))
    return optimizer


def _before_step(gradients: ShardedGradients, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if len(args) > 1 or kwargs.get("closure") is not None:  # args begin with the optimizer
        raise InvalidArgumentError(
            "DistributedOptimizer: step(closure) would average before the closure computes gradients; call backward() "
            "within opt.shard(), and then opt.step()"
        )
    gradients.before_step()


class ShardedGradients:
    """The gradients of one step of an optimizer."""

    def __init__(self, backend: Group, optimizer: torch.optim.Optimizer, shards: int | None) -> None:
        self._backend, self._optimizer = backend, weakref.ref(optimizer)
        self._settings = Settings(backend, optimizer, "DistributedOptimizer")
        like = {name: p.detach() for name, p in named_parameters(optimizer).items() if p.requires_grad}
        self._total = Accumulator(backend, shards, like=like)
        self._is_averaged = False
        self._is_within = False  # a shard
        self._has_added = False  # since the last mean, so that parameters have no gradients
        self._left: dict[str, int] = {}  # addresses of the gradients that `average` has left
        self._watches: list[Any] = []  # hooks, from `average` to the next step or shard
        self._verifier = Verifier.wanted(backend, f"DistributedOptimizer({type(optimizer).__name__})")

    @contextlib.contextmanager
    def shard(self, index: int | None = None, *, weight: float = 1.0) -> Iterator[None]:
        """Within this context `backward()` computes the gradients of one shard; at its end they are added.

        Gradients that parameters have before are dropped. Where the context is left by an exception nothing is added.

        Args:
          index: which shard, if the optimizer has `shards`.
          weight: how much it counts: most often its number of items, or tokens.

        Raises:
          InvalidArgumentError: within another shard; or as `Accumulator.add`.
        """
        if self._is_within:
            raise InvalidArgumentError(
                "DistributedOptimizer: opt.shard() within opt.shard(): its gradients would be lost"
            )
        parameters = self._parameters()
        self._stop_watching()
        _drop_gradients(parameters)
        self._is_within = True
        try:
            yield
            grads = {name: p.grad for name, p in parameters.items()}
            self._total.add(grads, shard=index, weight=weight, copy=False)  # parameters drop them here
            self._is_averaged, self._has_added = False, True
        finally:
            self._is_within = False
            _drop_gradients(parameters)

    def average(self) -> None:
        """Give all parameters the mean gradient of the step, e.g. to clip it before `step`. Collective.

        Raises: as `Accumulator.mean`; and InvalidArgumentError, on all ranks, if a gradient was computed after a shard.
        """
        parameters = self._parameters()
        outside = [name for name, p in parameters.items() if self._has_added and _is_nonzero(p.grad)]
        if outside:
            self._total._refuse(
                f"the gradient of {outside[0]} was computed outside of opt.shard(), and would be lost; call backward() "
                "within it, or zero_grad() after it"
            )
        self._has_added = False
        mean = self._total.mean()
        self._stop_watching()
        for name, parameter in parameters.items():
            parameter.grad = mean[name]
            refuse = functools.partial(_refuse_to_add, name)
            self._watches.append(parameter.register_post_accumulate_grad_hook(refuse))
        self._left = {name: _address(p.grad) for name, p in parameters.items()}
        self._is_averaged = True

    def _stop_watching(self) -> None:
        while self._watches:
            self._watches.pop().remove()

    def before_step(self) -> None:
        """Average, unless that has been done."""
        optimizer = self._optimizer()
        if self._verifier is not None and optimizer is not None:
            self._verifier.before_step(state_of(optimizer))
        if not self._is_averaged:
            self.average()
        else:
            grads = {name: p.grad for name, p in self._parameters().items()}
            if any(_address(g) != self._left.get(name, 0) for name, g in grads.items()):
                same(self._backend, grads, act="DistributedOptimizer: step()", when=_REPLACED)
        self._stop_watching()
        self._is_averaged = False
        if self._settings.have_changed():
            self._settings.compare()

    def _parameters(self) -> dict[str, torch.Tensor]:
        optimizer = self._optimizer()
        found = {} if optimizer is None else named_parameters(optimizer)
        return {name: parameter for name, parameter in found.items() if parameter.requires_grad}


def _refuse_to_add(name: str, _: torch.Tensor) -> None:
    raise InvalidArgumentError(
        f"DistributedOptimizer: backward() after opt.average() adds to the mean gradient of {name} what other ranks do "
        "not have; call it within opt.shard(), before opt.average()"
    )


def _address(grad: torch.Tensor | None) -> int:
    return 0 if grad is None else grad.data_ptr()


def _is_nonzero(grad: torch.Tensor | None) -> bool:
    return grad is not None and (grad.layout is not torch.strided or bool(grad.any()))


def _drop_gradients(parameters: dict[str, torch.Tensor]) -> None:
    for parameter in parameters.values():
        parameter.grad = None

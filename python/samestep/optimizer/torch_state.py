"""The parameters, state and settings of a torch optimizer, as ranks compare them."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from samestep import _core, arrays
from samestep.errors import InvalidArgumentError
from samestep.group.group import Group
from samestep.step.agree import require_same_order
from samestep.step.state_hash import same
from samestep.trees import signature
from samestep.trees.divided import viewed_by_fsdp, why_divided


def named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All parameters of an optimizer, by their place in it."""
    return {
        f"param_groups[{g}]['params'][{i}]": parameter
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    }


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What has to be the same on all ranks before a step."""
    return {"parameters": named_parameters(optimizer), "optimizer": optimizer}


def require_plain(optimizer: torch.optim.Optimizer, act: str, *, but: str = "") -> None:
    """Raise InvalidArgumentError unless an optimizer takes hooks, and nothing but `but` averages its gradients yet."""
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        raise InvalidArgumentError(
            f"{act}: {type(optimizer).__name__} has not called Optimizer.__init__, so that it takes no hooks; pass the "
            "optimizer that it works with, before it is wrapped"
        ) from None
    attributes = "_samestep_averager", "_samestep_shards", "_samestep_parts"
    if any(hasattr(optimizer, mark) for mark in attributes if mark != but):
        raise InvalidArgumentError(f"{act}: this optimizer is distributed already; make a new one")
    named = named_parameters(optimizer)
    viewed = viewed_by_fsdp(named.values())
    for name, parameter in named.items():
        if why := why_divided(parameter, viewed):
            raise InvalidArgumentError(f"{act}: {name} is {why}")


def as_row(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as one axis, in whatever order its axes lie; a view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients, mostly its own."""
    wanted: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return wanted or parameter.dtype


def require_same(backend: Group, act: str, named: dict[str, torch.Tensor]) -> None:
    """Check that gradients of parameters can be sent, and that all ranks hold the same parameters. Collective.

    Raises:
      InvalidArgumentError: a parameter has no memory of its own, or its dtype or layout cannot be sent.
      MismatchError: ranks hold other parameters, on all ranks; names the first that differs.
    """
    for name, parameter in named.items():
        if parameter.requires_grad:
            arrays.info(parameter, f"DistributedOptimizer: {name}")
    kinds = [
        f"{str(p.dtype)[6:]} {tuple(p.shape)} strides {p.stride()}{_particulars(p)}" for p in named.values()
    ]
    with _core.UserCall(act):
        signature.compare(backend, signature.Description.of(act, list(named), kinds))


def _particulars(parameter: torch.Tensor) -> str:
    dtype = gradient_dtype(parameter)
    of_gradients = "" if dtype == parameter.dtype else f" with gradients of {str(dtype)[6:]}"
    return of_gradients + ("" if parameter.requires_grad else " frozen")


_WHEN = "; ranks that set it by what they alone know drift apart: give a scheduler, for one, the mean loss of all ranks"
_BEGIN = (
    "; all ranks must begin with equal ones: pass the model through synchronize, and a state that one rank has loaded "
    "to optimizer.load_state_dict(backend.bcast_object(optimizer.state_dict()))"
)
_KINDS = (bool, int, float, str, tuple, type(None))


class Settings:
    """Those of one optimizer, which are compared after the first pass, and when they have changed.

    After the first pass, and after `load_state_dict`, values are compared as well: parameters that begin with other
    ones, or are updated by another state, stay different.

    Args:
      optimizer: a distributed one; not kept alive.
      divides_state: each rank has its own part of the state.
    """

    def __init__(
        self, backend: Group, optimizer: torch.optim.Optimizer, act: str, *, divides_state: bool = False
    ) -> None:
        self._backend, self._optimizer, self._act = backend, weakref.ref(optimizer), act
        self._divides_state = divides_state
        self._agreed: list[Any] | None = None
        self._n_loads = self._n_compared = 0
        optimizer.register_load_state_dict_post_hook(self._note_load)
        optimizer._samestep_settings = self  # `synchronize` makes them equal, and calls `forget`
        backend._follow(self, Settings.forget)

    def _note_load(self, _: torch.optim.Optimizer) -> None:
        self._n_loads += 1

    def forget(self, _: Any = None) -> None:
        """Compare in any case, as ranks do that come in."""
        self._agreed = None
        self._n_loads = self._n_compared = 0

    def have_changed(self) -> bool:
        """Whether they are not what all ranks have agreed on. No communication."""
        return self._backend.size > 1 and self._now() != self._agreed

    def compare(self) -> None:
        """Raise MismatchError, on all ranks, unless these settings are those of the other ranks. Collective."""
        now, act = self._now(), f"{self._act}: settings"
        text = np.frombuffer(repr(now[1:]).encode(), np.uint8)
        mine = np.frombuffer(_core.hash128(text), np.uint64)
        with _core.UserCall(act):
            differ = (self._backend.allgather(mine) != mine).any()
        if differ:  # on all ranks: one by one, which takes long for many groups
            named = {
                f"param_groups[{i}][{key!r}]": repr(value)
                for i, group in enumerate(now[1:])
                for key, value in group.items()
            }
            same(self._backend, named, act=act, when=_WHEN)
        if self._agreed is None:
            require_same_order(self._backend)
        if self._agreed is None or self._n_loads != self._n_compared:
            same(self._backend, self._values(), act=f"{self._act}: parameters and state", when=_BEGIN)
            self._n_compared = self._n_loads
        self._agreed = now

    def _values(self) -> dict[str, Any]:
        optimizer = self._optimizer()
        named = {} if optimizer is None else named_parameters(optimizer)
        trained = {n: p for n, p in named.items() if p.requires_grad and p.layout is torch.strided}
        states = {} if optimizer is None or self._divides_state else optimizer.state
        return {
            "parameters": trained,
            "state": {n: _comparable(states[p]) for n, p in trained.items() if p in states},
        }

    def _now(self) -> list[Any]:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return [self._n_loads, *map(_plain, groups)]


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """The settings that can be compared in every pass: no tensors of devices, for which it would wait."""
    found = {}
    for key, value in group.items():
        if type(value) in _KINDS:
            found[key] = value
        elif isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_cpu:
            found[key] = value.item()
    return found


def _comparable(state: Any) -> dict[str, Any]:
    return {
        str(key): value
        for key, value in state.items()
        if type(value) in (int, float) or (isinstance(value, torch.Tensor) and value.layout is torch.strided)
    }

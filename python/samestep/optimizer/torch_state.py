"""The parameters and state of a torch optimizer, by name."""

from __future__ import annotations

from typing import Any

import torch

from samestep import _core, arrays
from samestep.errors import InvalidArgumentError
from samestep.group.group import Group
from samestep.trees import signature
from samestep.trees.divided import viewed_by_fsdp, why_divided
from samestep.trees.fusion import timer


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
    """Check that an optimizer takes hooks, and that its gradients are not averaged yet, except by `but`.

    Raises:
      InvalidArgumentError: it does not, or they are.
    """
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
    mine = signature.Description(act, list(named), kinds, list(range(len(named))))
    with _core.UserCall(act):
        everyone = signature.gather_if_different(backend, mine, timer(None))
    if everyone is not None:
        signature.check_same(backend.name, everyone)


def _particulars(parameter: torch.Tensor) -> str:
    dtype = gradient_dtype(parameter)
    of_gradients = "" if dtype == parameter.dtype else f" with gradients of {str(dtype)[6:]}"
    return of_gradients + ("" if parameter.requires_grad else " frozen")

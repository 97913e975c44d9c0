"""The trial of `probe` for torch optimizers: copies of an optimizer on small parameters."""

from __future__ import annotations

import collections
import copy
from typing import Any

import torch

from samestep.optimizer import probe
from samestep.optimizer.torch_sharded_state import is_like
from samestep.optimizer.torch_state import named_parameters
from samestep.step.leaves import Flat, LeafSpec


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer works element by element; see `probe.require_elementwise`."""
    named = {name: p for name, p in named_parameters(optimizer).items() if p.requires_grad}
    specs = [LeafSpec("", "torch", str(p.dtype)[6:], tuple(p.shape)) for p in named.values()]

    def trial(params: list[Flat], steps: list[list[Flat]], shapes: list[tuple[int, ...]]) -> probe.Steps:
        def tensors(values: list[Flat]) -> list[torch.Tensor]:
            return [
                torch.from_numpy(value.copy()).to(p.dtype).to(p.device).reshape(shape)
                for value, p, shape in zip(values, named.values(), shapes, strict=True)
            ]

        small = list(map(torch.nn.Parameter, tensors(params)))
        other = _on(optimizer, dict(zip(named.values(), small, strict=True)))
        for grads in steps:
            before = [p.detach().clone() for p in small]
            for parameter, grad in zip(small, tensors(grads), strict=True):
                parameter.grad = grad
            other.step()
            changes = [
                (p.detach().double() - old.double()).reshape(-1).cpu().numpy()
                for p, old in zip(small, before, strict=True)
            ]
            settings = [{k: v for k, v in group.items() if k != "params"} for group in other.param_groups]
            yield changes, probe.state_of(settings)

    probe.require_elementwise(type(optimizer).__name__, list(named), specs, trial)


def _on(
    optimizer: torch.optim.Optimizer, new: dict[torch.Tensor, torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings for other parameters, made as `pickle` makes one."""
    groups = [
        {
            **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
            "params": [new[p] for p in group["params"] if p in new],
        }
        for group in optimizer.param_groups
    ]
    state: dict[Any, Any] = collections.defaultdict(dict)
    for old, entries in optimizer.state.items():
        if old in new:
            state[new[old]] = {key: _shrunk(key, value, old, new[old]) for key, value in entries.items()}
    made: Any = object.__new__(type(optimizer))
    made.__setstate__({**optimizer.__getstate__(), "state": state, "param_groups": groups})
    return made


def _shrunk(key: str, value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    if not is_like(key, value, old.shape):
        return copy.deepcopy(value)
    return value.reshape(-1)[: new.numel()].clone().reshape(new.shape)

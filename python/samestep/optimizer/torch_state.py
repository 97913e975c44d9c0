"""The parameters and state of a torch optimizer, by name."""

from __future__ import annotations

from typing import Any

import torch

from samestep.errors import InvalidArgumentError

__all__ = ["named_parameters", "require_plain", "state_of"]


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
    """Check that gradients of an optimizer are not averaged yet, except by `but`.

    Raises:
      InvalidArgumentError: they are.
    """
    attributes = "_samestep_averager", "_samestep_shards", "_samestep_parts"
    if any(hasattr(optimizer, mark) for mark in attributes if mark != but):
        raise InvalidArgumentError(f"{act}: this optimizer is distributed already; make a new one")

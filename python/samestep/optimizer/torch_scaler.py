"""Steps of a sharded torch optimizer that a `torch.amp.GradScaler` calls.

A scaler skips the step of an ordinary optimizer where it has found an infinity in this rank's gradients, and the other
ranks would pair their step with this rank's next one. Of an optimizer with `_step_supports_amp_scaling` it always calls
`step`, and sets `found_inf` and `grad_scale` for the call; see `torch.amp.GradScaler.step`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from samestep import _core
from samestep.errors import InvalidArgumentError
from samestep.group.group import Group

_HOW = "call opt.average() before scaler.unscale_(opt) and scaler.step(opt), so that all ranks see the same gradients"


def unscale(
    backend: Group, optimizer: Any, parameters: Iterable[torch.Tensor], *, is_averaged: bool, act: str
) -> bool:
    """Divide mean gradients by the scale that a scaler asks for, if one calls. Collective then.

    Args:
      backend: the group.
      optimizer: the one whose step begins.
      parameters: whose `.grad` are unscaled.
      is_averaged: whether these are the means over all ranks.
      act: the call, for errors.

    Returns:
      Whether to update: False, on all ranks, if the scaler has found an infinity.

    Raises:
      InvalidArgumentError: on all ranks: the gradients are not averaged yet, or were not when the scaler looked at them
        and found an infinity on some ranks only.
    """
    found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found is None:
        return True
    optimizer.found_inf = optimizer.grad_scale = None  # for this step only; the scaler deletes the attributes
    if not is_averaged:
        raise InvalidArgumentError(f"{act} in group {backend.name}, called by a GradScaler: {_HOW}")
    mine = int(bool(found))
    with _core.UserCall(f"{act}, called by a GradScaler"):
        any_rank, no_rank = backend.allreduce(np.array([mine, -mine]), "max").tolist()
    if any_rank != -no_rank:
        raise InvalidArgumentError(
            f"{act} in group {backend.name}: a GradScaler found infinities on some ranks only; {_HOW}"
        )
    if mine:
        return False
    if scale is not None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(scale)
    return True

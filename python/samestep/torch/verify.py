"""`SAMESTEP_VERIFY` for DistributedDataParallel: compares parameters before every n-th forward pass."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from samestep.step.state_hash import Verifier, verify_interval

_installed: list[Any] = []
_verifiers: weakref.WeakKeyDictionary[Any, Verifier] = weakref.WeakKeyDictionary()


def install() -> None:
    """Compare from now on, if the environment asks for it. Idempotent.

    Raises:
      InvalidArgumentError: `SAMESTEP_VERIFY` is not a number of steps.
    """
    if verify_interval() and not _installed:
        _installed.append(register_module_forward_pre_hook(_before_forward))


def _before_forward(module: Any, _: Any) -> None:
    if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return
    joins = getattr(
        getattr(module, "_join_config", None), "enable", False
    )  # then ranks run out of batches one after another
    if joins or not (module.training and torch.is_grad_enabled() and module.require_backward_grad_sync):
        return
    if module not in _verifiers:
        backend = _backend_of(module.process_group)
        verifier = None if backend is None else Verifier.wanted(backend, "DistributedDataParallel")
        if verifier is None:
            return
        _verifiers[module] = verifier
    _verifiers[module].before_step(dict(module.module.named_parameters()))


def _backend_of(group: Any) -> Any:
    """The group of samestep behind a process group of torch; None if that is another backend's."""
    if hasattr(group, "_backend"):
        return group._backend
    try:
        return getattr(group._get_backend(torch.device("cpu")), "_backend", None)
    except RuntimeError:  # no backend for the host
        return None

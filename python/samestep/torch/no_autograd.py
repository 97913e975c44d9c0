"""Hides the operations of this backend on tensors from autograd and modes."""

from __future__ import annotations

import contextlib

import torch

_n_dispatch_modes, _n_function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


class without_autograd:
    """A context in which autograd does not record operations on tensors.

    A class with slots: `torch.no_grad` in a generator costs more than a short operation.
    """

    __slots__ = ("_modes", "_recorded")

    def __enter__(self) -> None:
        self._modes: contextlib.ExitStack | None = None
        if has_modes():
            from torch.utils._python_dispatch import _disable_current_modes

            self._modes = contextlib.ExitStack()
            self._modes.enter_context(_disable_current_modes())
            self._modes.enter_context(torch._C.DisableTorchFunction())
        self._recorded = torch.is_grad_enabled()
        if self._recorded:
            torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        if self._recorded:
            torch._C._set_grad_enabled(True)
        if self._modes is not None:
            self._modes.close()


def has_modes() -> bool:
    """Whether a mode of torch is active that intercepts all operations on tensors."""
    return bool(_n_dispatch_modes() or _n_function_modes())

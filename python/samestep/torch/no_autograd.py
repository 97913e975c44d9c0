"""Hides the operations of this backend on tensors from autograd, modes and torch.compile."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch

__all__ = ["disable_dynamo", "has_modes", "without_autograd"]


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


def disable_dynamo(*owners: Any) -> None:
    """Let torch.compile run the functions of these classes and modules, and all that they call, uncompiled.

    `torch.compiler.disable` does the same, but imports the compiler, which takes longer than all of torch.
    """
    frames = torch._C._dynamo.eval_frame
    try:
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    except (
        AttributeError
    ):  # another version: compiled functions are slower and may be refused, but are not wrong
        return
    for owner in owners:
        for member in vars(owner).values():
            function = getattr(member, "fget", None) or getattr(member, "__wrapped__", member)
            for candidate in (member, function):
                if isinstance(candidate, types.FunctionType):
                    candidate._torchdynamo_disable = True  # type: ignore[attr-defined]
                    frames.set_code_exec_strategy(candidate.__code__, skip)

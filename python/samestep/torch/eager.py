"""What this backend does with tensors is seen by nobody: autograd, modes, torch.compile."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["aside", "hide_from_compiler"]


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Operations on tensors in this context are recorded by nobody."""
    with torch.no_grad():
        if torch._C._len_torch_dispatch_stack() == 0 and torch._C._len_torch_function_stack() == 0:
            yield
            return
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes(), torch._C.DisableTorchFunction():
            yield


def hide_from_compiler(*owners: Any) -> None:
    """torch.compile runs the functions of these classes and modules as they are, and all that they call.

    `torch.compiler.disable` does the same, but imports the compiler, which takes longer than all of torch.
    """
    frames = torch._C._dynamo.eval_frame
    try:
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    except (
        AttributeError
    ):  # another version: traced functions are slower and may be refused, but are not wrong
        return
    for owner in owners:
        for member in vars(owner).values():
            function = getattr(member, "fget", None) or getattr(member, "__wrapped__", member)
            for candidate in (member, function):
                if isinstance(candidate, types.FunctionType):
                    candidate._torchdynamo_disable = True  # type: ignore[attr-defined]
                    frames.set_code_exec_strategy(candidate.__code__, skip)

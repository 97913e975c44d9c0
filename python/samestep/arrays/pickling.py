"""Pickles of objects for other ranks: tensors of torch in device memory arrive on the device of the receiver."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any


def dumps(obj: Any) -> bytes | memoryview:
    """As `pickle.dumps`, but tensors of torch in device memory become those of the process that loads them.

    torch itself loads a tensor to the device that it had, which another rank shares with nobody, or does not have.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getbuffer()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules["torch"]
        kind = type(obj)
        if kind not in (torch.Tensor, torch.nn.Parameter) or not obj.is_cuda or obj.__dict__:
            return NotImplemented
        return _on_own_device, (obj.detach().cpu(), obj.requires_grad, kind is torch.nn.Parameter)


def _on_own_device(x: Any, requires_grad: bool, is_parameter: bool) -> Any:
    import torch

    if torch.cuda.is_available():
        x = x.cuda()  # the current device, which is that of the rank
    return torch.nn.Parameter(x, requires_grad) if is_parameter else x.requires_grad_(requires_grad)

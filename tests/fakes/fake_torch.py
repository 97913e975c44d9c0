"""What this package needs of torch's tensors on a GPU, on the stand-in of the runtime: `sys.modules["torch"]`.

As in torch, tensors do not know a stream: work on them is in the current stream of the thread, which is another one
than the default stream where the user says so.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import fake_arrays
import numpy as np

_current: list[fake_arrays.Stream] = [fake_arrays.DEFAULT]


class Tensor(fake_arrays.ConvertingArray, fake_arrays.DLPackArray):
    is_cuda, requires_grad, layout = True, False, "torch.strided"

    @property
    def device(self) -> int:
        return self._place[0]

    def get_device(self) -> int:
        return self._place[0]

    def detach(self) -> Tensor:
        return self

    def dim(self) -> int:
        return len(self.shape)

    def is_contiguous(self) -> bool:
        return True

    def view(self, *shape: int) -> Tensor:
        return self.reshape(*shape)  # type: ignore[return-value]

    def float(self) -> Tensor:
        return self.astype("float32")  # type: ignore[return-value]

    def copy_(self, source: Tensor) -> Tensor:
        self[...] = source
        return self

    def is_conj(self) -> bool:
        return False

    def is_neg(self) -> bool:
        return False


def tensor(values: np.ndarray[Any, Any]) -> Tensor:
    """Made in the current stream."""
    return Tensor.of(values, _current[0])  # type: ignore[return-value]


def set_stream(stream: fake_arrays.Stream) -> None:
    _current[0] = stream


def _current_stream(device: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(cuda_stream=_current[0].handle)


def _raw_stream(device: int) -> int | None:
    return _current[0].handle


def _set_device(device: int) -> None:
    fake_arrays.call("SetDevice", device)


def install(*, with_raw_streams: bool = True) -> None:
    """`import torch` gives this module, for the rest of the process.

    `with_raw_streams`: whether it has the function, private to torch, that gives a stream's handle alone.
    """
    graph: Any = types.ModuleType("torch.autograd.graph")
    graph.increment_version = lambda tensors: None
    autograd: Any = types.ModuleType("torch.autograd")
    autograd.graph = graph
    torch: Any = types.ModuleType("torch")
    torch.Tensor, torch.autograd = Tensor, autograd
    torch._C = types.SimpleNamespace()
    if with_raw_streams:
        torch._C._cuda_getCurrentRawStream = _raw_stream
    torch.cuda = types.SimpleNamespace(
        current_stream=_current_stream, is_available=lambda: True, set_device=_set_device
    )
    sys.modules |= {"torch": torch, "torch.autograd": autograd, "torch.autograd.graph": graph}

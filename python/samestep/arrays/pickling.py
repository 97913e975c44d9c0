"""Pickles of objects: arrays of JAX keep their type, and tensors in device memory go to the device of the receiver."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

import numpy as np

from samestep.arrays.of_jax import is_jax, keeping_dtype

_LONG = ("int64", "uint64", "float64", "complex128")


def dumps(obj: Any, *, for_others: bool = True) -> bytes | memoryview:
    """As `pickle.dumps`, but arrays are loaded as they are here.

    JAX itself loads arrays of 64 bits that were made under `enable_x64` as ones of 32 bits outside of it, integers as
    their low ones. torch loads a tensor to the device that it had, which another rank shares with nobody, or does not
    have: `for_others`, those in device memory become tensors of the process that loads them.
    """
    torch = sys.modules.get("torch")
    to_devices = for_others and torch is not None and torch.cuda.is_initialized()
    if not to_devices and "jax" not in sys.modules:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    file = io.BytesIO()
    _Pickler(file, to_devices=to_devices).dump(obj)
    return file.getbuffer()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, *, to_devices: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._to_devices = to_devices

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind.__name__ == "ArrayImpl" and is_jax(obj):
            return (
                (_in_64_bits, (obj.dtype.name, *obj.__reduce__()[:2]))
                if obj.dtype.name in _LONG
                else NotImplemented
            )
        if not self._to_devices:
            return NotImplemented
        torch = sys.modules["torch"]
        if kind not in (torch.Tensor, torch.nn.Parameter) or not obj.is_cuda or obj.__dict__:
            return NotImplemented
        return _on_own_device, (obj.detach().cpu(), obj.requires_grad, kind is torch.nn.Parameter)


def _in_64_bits(dtype: str, make: Any, args: tuple[Any, ...]) -> Any:
    """Make an array of JAX of that type."""
    import jax  # noqa: F401 (for `keeping_dtype`)

    with keeping_dtype(np.empty(0, dtype)):
        return make(*args)


def _on_own_device(x: Any, requires_grad: bool, is_parameter: bool) -> Any:
    import torch

    if torch.cuda.is_available():
        x = x.cuda()  # the current device, which is that of the rank
    return torch.nn.Parameter(x, requires_grad) if is_parameter else x.requires_grad_(requires_grad)

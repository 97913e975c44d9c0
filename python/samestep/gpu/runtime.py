"""The GPU of this rank, and the runtime library for it."""

from __future__ import annotations

import functools
import sys
from typing import Any

from samestep import _core
from samestep.errors import UnavailableError
from samestep.gpu import discovery, jax_devices

_CURE = "`samestep doctor` shows what was found, and why others were passed over."


@functools.cache
def gpu(kind: str) -> _core.GpuLibrary:
    """The runtime of "cuda" or "hip" devices, opened at the first use.

    Raises:
      UnavailableError: there is none; lists where it was looked for.
    """
    found = discovery.runtime_library(kind)
    if not found.path:
        raise UnavailableError(f"{found.detail}. {_CURE}")
    return _core.GpuLibrary.open("rocm" if kind == "hip" else "cuda", found.path)


@functools.cache
def nccl(kind: str) -> _core.NcclLibrary:
    """NCCL for "cuda" devices or RCCL for "hip" ones, opened at the first use; raises as `gpu`."""
    found = discovery.communication_library(kind, may_open=True)
    if not found.path:
        raise UnavailableError(f"{found.detail}. {_CURE}")
    return _core.NcclLibrary.open(found.path)


def current_gpu(kind: str = "") -> _core.GpuLibrary:
    """The runtime that is in use: of "cuda" or "rocm" devices, "" for whichever kind this process has."""
    if not kind:
        kind = _kinds[-1] if _kinds else "cuda"
    return gpu("hip" if kind in ("hip", "rocm") else "cuda")


_kinds: list[str] = []


def set_current(kind: str, device: int) -> None:
    """Make `device` the process's current one, also that of torch, CuPy and JAX where they have been imported."""
    gpu(kind).set_device(device)
    _kinds.append(kind)
    jax_devices.use(kind, device)
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(device)
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None:
        cupy.cuda.Device(device).use()

"""torch with CUDA tensors on the stand-in of the runtime, in a process that has not imported torch.

As in torch, work on tensors is in the current stream, here always the default stream. Not everything that a build with
CUDA can do: tensors are made on the host and moved.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import fake_libraries


def load() -> Any:
    """The module `torch`; `cuda_copies()` counts the kernels of this process that have copied tensors."""
    assert "torch" not in sys.modules, "what asks for the hooks of CUDA gets them once"
    os.environ["FAKE_GPU_HOST_ACCESS"] = "1"
    library = ctypes.CDLL(str(fake_libraries.build_torch()), ctypes.RTLD_GLOBAL)
    library.torchCopies.restype = ctypes.c_long
    import torch

    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]
    torch.cuda_copies = library.torchCopies  # type: ignore[attr-defined]
    return torch

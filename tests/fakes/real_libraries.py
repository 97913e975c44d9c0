"""With TEST_DEVICES=real, the machine's own CUDA runtime and NCCL in place of the stand-ins.

All ranks share its devices, by an NCCL_HOSTID for each rank. Tests of what only the stand-ins can tell are skipped.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, NoReturn

import numpy as np
from samestep._util import launchers
from samestep.gpu import discovery

NO_SUCH_DEVICE = 101  # cudaErrorInvalidDevice


def wanted() -> bool:
    value = os.environ.get("TEST_DEVICES", "")
    assert value in ("", "real"), f"TEST_DEVICES={value}: only 'real' has a meaning"
    return value == "real"


def let_ranks_share_a_device() -> None:
    """Before NCCL looks at its variables. Its kernels of all ranks must find room on the device together."""
    rank = launchers.launcher().rank
    defaults = {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    # Tests that take JAX's arrays mean those of the host.
    defaults |= {"NCCL_MAX_CTAS": "4", "JAX_PLATFORMS": "cpu"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def skip(why: str = "only the stand-ins tell this") -> NoReturn:
    import pytest

    pytest.skip(why)


class Runtime:
    """The CUDA runtime, with what the stand-in adds to delay a stream."""

    def __init__(self) -> None:
        self._runtime = ctypes.CDLL(discovery.runtime_library("cuda").path)
        self._usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
        self._held: dict[int | None, ctypes.c_uint32] = {}

    def cudaSetDevice(self, device: int) -> int:
        code = int(self._runtime.cudaSetDevice(device))
        if code == NO_SUCH_DEVICE:
            skip("this needs more devices")
        return code

    def fakeConvert(self, to: Any, source: Any, count: ctypes.c_size_t, widens: int, stream: Any) -> int:
        """From float16 to float32 or back, by way of the host."""
        types = [np.dtype("float16"), np.dtype("float32")]
        there, here = types if widens else types[::-1]
        values = np.empty(count.value, there)
        nbytes = ctypes.c_size_t(values.nbytes)
        self._check(
            self._runtime.cudaMemcpyAsync(ctypes.c_void_p(values.ctypes.data), source, nbytes, 4, stream)
        )
        self._check(self._runtime.cudaStreamSynchronize(stream))
        values = values.astype(here)
        nbytes = ctypes.c_size_t(values.nbytes)
        self._check(self._runtime.cudaMemcpyAsync(to, ctypes.c_void_p(values.ctypes.data), nbytes, 4, stream))
        return int(self._runtime.cudaStreamSynchronize(stream))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("fake"):
            skip()
        return getattr(self._runtime, name)

    def fakeDelay(self, stream: int | None, microseconds: int) -> None:
        self._check(
            self._runtime.cudaLaunchHostFunc(
                ctypes.c_void_p(stream), self._usleep, ctypes.c_void_p(microseconds)
            )
        )

    def fakeHold(self, stream: ctypes.c_void_p) -> None:
        """The stream waits for a word of host memory, which occupies nothing of the device."""
        word = ctypes.c_void_p()
        self._check(self._runtime.cudaHostAlloc(ctypes.byref(word), ctypes.c_size_t(4), 0))
        flag = ctypes.c_uint32.from_address(word.value or 0)
        flag.value = 0
        self._held[stream.value] = flag
        at_least = 0
        self._check(
            ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2(
                stream, ctypes.c_uint64(word.value or 0), ctypes.c_uint32(1), at_least
            )
        )

    def fakeRelease(self, stream: ctypes.c_void_p) -> None:
        self._held.pop(stream.value).value = 1

    @staticmethod
    def _check(code: int) -> None:
        assert code == 0, code

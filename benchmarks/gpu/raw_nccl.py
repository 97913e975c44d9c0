"""NCCL itself through ctypes, without anything of the package between: what its calls cost alone."""

from __future__ import annotations

import ctypes
from typing import Any

FLOAT32, SUM = 7, 0


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class RawNccl:
    """A communicator that blocks, of one rank: the current device's."""

    def __init__(self, path: str) -> None:
        self._nccl = ctypes.CDLL(path)
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._nccl.ncclCommInitRankConfig.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int,
            UniqueId,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        pointers = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._all_reduce = self._nccl.ncclAllReduce
        self._all_reduce.argtypes = [*pointers, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self._comm = ctypes.c_void_p()
        identity = UniqueId()
        self._check(self._nccl.ncclGetUniqueId(ctypes.byref(identity)))
        config = Config()
        self._check(
            self._nccl.ncclCommInitRankConfig(ctypes.byref(self._comm), 1, identity, 0, ctypes.byref(config))
        )

    def _check(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"NCCL: {self._nccl.ncclGetErrorString(code).decode()} ({code})")

    def all_reduce(self, target: int, source: int, count: int, stream: int) -> None:
        """The sum of `count` float32."""
        code = self._all_reduce(source, target, count, FLOAT32, SUM, self._comm, stream)
        if code != 0:
            self._check(code)

    def group(self, pairs: Any, stream: int) -> None:
        """Sums in place of (address, count) each, in one group."""
        self._check(self._nccl.ncclGroupStart())
        for place, count in pairs:
            self.all_reduce(place, place, count, stream)
        self._check(self._nccl.ncclGroupEnd())

    def close(self) -> None:
        self._check(self._nccl.ncclCommDestroy(self._comm))


class Config(ctypes.Structure):
    """As much of ncclConfig_t as every version has."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]

    def __init__(self) -> None:
        super().__init__(ctypes.sizeof(Config), 0xCAFEBEEF, 21403, 1)

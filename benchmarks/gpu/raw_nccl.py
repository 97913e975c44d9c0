"""NCCL itself through ctypes, without anything of the package between: what its calls cost alone."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

FLOAT32, SUM = 7, 0
SUCCESS, IN_PROGRESS = 0, 7
PATIENCE_S = 30.0  # for other ranks, and for NCCL itself


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class RawNccl:
    """A communicator on the current device."""

    def __init__(
        self,
        path: str,
        *,
        rank: int = 0,
        size: int = 1,
        meeting: Path | None = None,
        blocking: bool = True,
        wait: bool = True,
    ) -> None:
        """Begin, together with the other ranks.

        Args:
          path: of the library.
          rank: of this process.
          size: ranks.
          meeting: the file in which ranks meet, if there are several.
          blocking: whether calls return only when NCCL has done them.
          wait: until all ranks have arrived.
        """
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
        message = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self._nccl.ncclSend.argtypes = self._nccl.ncclRecv.argtypes = message
        self._comm = ctypes.c_void_p()
        identity, config = self._identity(rank, meeting), Config(blocking)
        code = self._nccl.ncclCommInitRankConfig(
            ctypes.byref(self._comm), size, identity, rank, ctypes.byref(config)
        )
        self._accept(code, until_done=wait)

    def _identity(self, rank: int, meeting: Path | None) -> UniqueId:
        identity = UniqueId()
        if rank == 0:
            self._check(self._nccl.ncclGetUniqueId(ctypes.byref(identity)))
            if meeting is not None:
                part = meeting.with_suffix(".part")
                part.write_bytes(bytes(identity))
                part.rename(meeting)
            return identity
        assert meeting is not None
        deadline = time.monotonic() + PATIENCE_S
        while not meeting.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return UniqueId.from_buffer_copy(meeting.read_bytes())

    def _check(self, code: int) -> None:
        if code != SUCCESS:
            raise RuntimeError(f"NCCL: {self._nccl.ncclGetErrorString(code).decode()} ({code})")

    def _accept(self, code: int, *, until_done: bool = True) -> None:
        """Waits for what is in progress."""
        state = ctypes.c_int(code)
        deadline = time.monotonic() + PATIENCE_S
        while until_done and state.value == IN_PROGRESS and time.monotonic() < deadline:
            self._check(self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
        if until_done or state.value != IN_PROGRESS:
            self._check(state.value)

    def all_reduce(self, target: int, source: int, count: int, stream: int) -> None:
        """The sum of `count` float32."""
        code = self._all_reduce(source, target, count, FLOAT32, SUM, self._comm, stream)
        if code != SUCCESS:
            self._accept(code)

    def send_to_itself(self, target: int, source: int, count: int, stream: int) -> None:
        """A send and the receive of it, in one group: even with one rank NCCL launches a kernel for that."""
        self._check(self._nccl.ncclGroupStart())
        self._check(self._nccl.ncclSend(source, count, FLOAT32, 0, self._comm, stream))
        self._check(self._nccl.ncclRecv(target, count, FLOAT32, 0, self._comm, stream))
        self._accept(self._nccl.ncclGroupEnd())

    def abort(self) -> None:
        self._check(self._nccl.ncclCommAbort(self._comm))

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

    def __init__(self, blocking: bool) -> None:
        super().__init__(ctypes.sizeof(Config), 0xCAFEBEEF, 21403, int(blocking))


def find() -> str:
    """The NCCL that the package would use."""
    from samestep.gpu import discovery

    return discovery.communication_library("cuda", may_open=True).path

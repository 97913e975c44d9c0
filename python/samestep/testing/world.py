"""The world a rank offers to its tests: one backend at a time, made again when a test has ended it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from samestep import world
from samestep.backend import Backend, MPIBackend, NativeBackend, NCCLBackend


class WorldHolder:
    """Keeps the world between tests, since initialising costs more than most tests."""

    def __init__(self, timeout: float, folder: Path | None = None) -> None:
        self._timeout = timeout
        self._folder = folder or Path(tempfile.gettempdir())  # for files by which ranks meet
        self._name: str | None = None
        self._backend: Backend | None = None
        self.place = ""

    def get(self, name: str) -> Backend:
        """The world on backend `name`; collective when the last one was another or has been closed."""
        if self._backend is None or self._name != name or self._backend.closed:
            self.close()
            self._backend = _opening(name)(self._timeout, self._folder)
            self._name = name
            self.place = _place(self._backend)
        return self._backend

    def give_up(self, reason: str) -> None:
        """Tell the peers that this rank has failed, so that they need not wait for a deadline."""
        if self._backend is not None and not self._backend.closed:
            self._backend._abandon(reason)

    def close(self) -> None:
        """Finalise whatever world exists, ours or one a test made."""
        self._name = self._backend = None
        if world.initialized():
            world.finalize()
        while _places:
            with contextlib.suppress(OSError):
                _places.pop().rmdir()


def offer(name: str, opening: Callable[[float, Path], Backend]) -> None:
    """Let `samestep_backends` and the mark `ranks` name another world.

    Args:
      name: of the world.
      opening: makes it, collectively, given the timeout and a folder for files by which ranks may meet.
    """
    _OPENINGS[name] = opening


def _alone(timeout: float, _: Path) -> Backend:
    return world.initialize(NativeBackend, timeout=timeout)


def _mpi(timeout: float, _: Path) -> Backend:
    return world.initialize(MPIBackend, timeout=timeout)


def _nccl(timeout: float, _: Path) -> Backend:
    return world.initialize(NCCLBackend, timeout=timeout)


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _mpi_alone(timeout: float, folder: Path) -> Backend:
    """All through MPI, shared memory or not."""
    with _variable("SAMESTEP_MPI_ENGINE", "direct"):
        return _mpi(timeout, folder)


def _native(timeout: float, folder: Path) -> Backend:
    """Without MPI, but for the ranks' agreement on a place to meet."""
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD
    if ranks.Get_size() == 1:
        return _alone(timeout, folder)
    place = ranks.bcast(tempfile.mkdtemp(prefix="samestep-", dir=folder) if ranks.Get_rank() == 0 else None)
    method = f"file://{place}/meeting"
    try:
        return world.initialize(
            NativeBackend,
            init_method=method,
            rank=ranks.Get_rank(),
            world_size=ranks.Get_size(),
            timeout=timeout,
        )
    finally:
        if ranks.Get_rank() == 0:
            _places.append(Path(place))


def _tcp(timeout: float, folder: Path) -> Backend:
    """Without MPI, as between hosts."""
    with _variable("SAMESTEP_NATIVE_ENGINE", "tcp"):
        return _native(timeout, folder)


def _halving(timeout: float, folder: Path) -> Backend:
    """As between many hosts: partners exchange halves."""
    with _variable("SAMESTEP_ALGORITHM", "halving"), _variable("SAMESTEP_WINDOW_PIECE", "4096"):
        return _tcp(timeout, folder)


def _pretended_host(rank: int, size: int) -> str:
    """Which host a rank says it is on: two on each where that fills hosts, else one, so that sums keep their order."""
    return str(rank // 2 if size > 2 and size % 2 == 0 else rank)


def _hier_native(timeout: float, folder: Path) -> Backend:
    """Over TCP, at two levels."""
    with _variable("SAMESTEP_NATIVE_ENGINE", "hier"):
        return _over_hosts(_native, timeout, folder)


def _hier_mpi(timeout: float, folder: Path) -> Backend:
    """Over MPI, at two levels."""
    with _variable("SAMESTEP_MPI_ENGINE", "hier"):
        return _over_hosts(_mpi, timeout, folder)


def _over_hosts(opening: Callable[[float, Path], Backend], timeout: float, folder: Path) -> Backend:
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD
    with _variable("SAMESTEP_HOST_ID", _pretended_host(ranks.Get_rank(), ranks.Get_size())):
        return opening(timeout, folder)


_places: list[Path] = []  # of meetings; their files go with the worlds
_OPENINGS: dict[str, Callable[[float, Path], Backend]] = {
    "self": _alone,
    "mpi": _mpi,
    "direct": _mpi_alone,
    "native": _native,
    "tcp": _tcp,
    "halving": _halving,
    "hier": _hier_native,
    "hier-mpi": _hier_mpi,
    "nccl": _nccl,
}


def _opening(name: str) -> Callable[[float, Path], Backend]:
    if name not in _OPENINGS:
        raise ValueError(f"samestep_backends: unknown backend {name!r}; known: {', '.join(_OPENINGS)}")
    return _OPENINGS[name]


def _place(backend: Backend) -> str:
    """Where this world is, for the summary: "Open MPI 5.0.11, one host"; empty without an MPI library."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return ""
    name, version = mpi.get_vendor()
    hosts = "one host" if backend.node_count == 1 else f"{backend.node_count} hosts"
    return f"{name} {'.'.join(map(str, version))}, {hosts}"

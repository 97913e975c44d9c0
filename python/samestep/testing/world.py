"""The world that a rank provides to its tests: one backend at a time, made anew after a test has closed it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from samestep import _settings, internal
from samestep._util import launchers
from samestep.backend import Backend, MPIBackend, NativeBackend, NCCLBackend
from samestep.testing import protocol
from samestep.world import lifecycle


class WorldHolder:
    """Keeps the world between tests, since initialising costs more than most tests."""

    def __init__(self, timeout: float, folder: Path | None = None) -> None:
        self._timeout = timeout
        self._folder = folder or Path(tempfile.gettempdir())  # for the files of a rendezvous
        self._name: str | None = None
        self._backend: Backend | None = None
        self.place = ""

    def get(self, name: str) -> Backend:
        """The world on backend `name`; collective if the last one was another backend or has been closed."""
        if self._backend is None or self._name != name or self._backend.closed:
            self.close()
            self._backend = _opener(name)(self._timeout, self._folder)
            self._name = name
            self.place = _where(self._backend)
        return self._backend

    def fail(self, reason: str) -> None:
        """Tell the peers that this rank has failed, so that they need not wait for a deadline."""
        if self._backend is not None and not self._backend.closed:
            internal.abandon(self._backend, reason)

    def close(self) -> None:
        """Finalise the current world, also one that a test has made."""
        self._name = self._backend = None
        if lifecycle.initialized():
            lifecycle.finalize()
        while _places:
            with contextlib.suppress(OSError):
                _places.pop().rmdir()


def register_world(name: str, opener: Callable[[float, Path], Backend]) -> None:
    """Add a world that `samestep_backends` and the mark `ranks` may name.

    Args:
      name: of the world.
      opener: a collective function of the timeout and of a folder for the files of a rendezvous.
    """
    _OPENERS[name] = opener


def _alone(timeout: float, _: Path) -> Backend:
    return lifecycle.initialize(NativeBackend, timeout=timeout)


def _mpi(timeout: float, _: Path) -> Backend:
    return lifecycle.initialize(MPIBackend, timeout=timeout)


def _nccl(timeout: float, _: Path) -> Backend:
    return lifecycle.initialize(NCCLBackend, timeout=timeout)


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


def _mpi_only(timeout: float, folder: Path) -> Backend:
    """Over MPI alone, without shared memory."""
    with _variable(_settings.MPI_TRANSPORT, "mpi"):
        return _mpi(timeout, folder)


def _native(timeout: float, folder: Path) -> Backend:
    """Without MPI. If an MPI launcher has started the ranks, they agree on a rendezvous over MPI."""
    if protocol.launcher_world() is None:
        return lifecycle.initialize(NativeBackend, timeout=timeout)
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD
    if ranks.Get_size() == 1:
        return _alone(timeout, folder)
    place = ranks.bcast(tempfile.mkdtemp(prefix="samestep-", dir=folder) if ranks.Get_rank() == 0 else None)
    method = f"file://{place}/meeting"
    try:
        return lifecycle.initialize(
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
    with _variable(_settings.NATIVE_TRANSPORT, "tcp"):
        return _native(timeout, folder)


def _halving(timeout: float, folder: Path) -> Backend:
    """Recursive halving, as between many hosts."""
    with _variable(_settings.ALGORITHM, "recursive_halving"), _variable(_settings.SEGMENT_BYTES, "4096"):
        return _tcp(timeout, folder)


def _pretended_host(rank: int, size: int) -> str:
    """The simulated host of a rank: two ranks on each if that fills all hosts, else one, so that sums keep order."""
    return str(rank // 2 if size > 2 and size % 2 == 0 else rank)


def _hosts(timeout: float, folder: Path) -> Backend:
    """Shared memory within simulated hosts, TCP between them."""
    with _variable(_settings.NATIVE_TRANSPORT, "hierarchical"):
        return _over_hosts(_native, timeout, folder)


def _hosts_mpi(timeout: float, folder: Path) -> Backend:
    """Shared memory within simulated hosts, MPI between them."""
    with _variable(_settings.MPI_TRANSPORT, "hierarchical"):
        return _over_hosts(_mpi, timeout, folder)


def _over_hosts(opener: Callable[[float, Path], Backend], timeout: float, folder: Path) -> Backend:
    started_by = launchers.launcher()
    with _variable(_settings.HOST_ID, _pretended_host(started_by.rank, started_by.size)):
        return opener(timeout, folder)


_places: list[Path] = []  # folders of rendezvous files, removed with the job
_OPENERS: dict[str, Callable[[float, Path], Backend]] = {
    "self": _alone,
    "mpi": _mpi,
    "mpi-only": _mpi_only,
    "native": _native,
    "tcp": _tcp,
    "halving": _halving,
    "hosts": _hosts,
    "hosts-mpi": _hosts_mpi,
    "nccl": _nccl,
}


def _opener(name: str) -> Callable[[float, Path], Backend]:
    if name not in _OPENERS:
        raise ValueError(f"samestep_backends: unknown backend {name!r}; known: {', '.join(_OPENERS)}")
    return _OPENERS[name]


def _where(backend: Backend) -> str:
    """Where this world is, for the summary: "Open MPI 5.0.11, one host"; empty without an MPI library."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return ""
    name, version = mpi.get_vendor()
    hosts = "one host" if backend.node_count == 1 else f"{backend.node_count} hosts"
    return f"{name} {'.'.join(map(str, version))}, {hosts}"

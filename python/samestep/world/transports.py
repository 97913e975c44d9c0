"""The choice of transport for the ranks of a job."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from samestep import _core, _settings
from samestep._settings import SETTINGS, get, parse
from samestep._util.deadline import Deadline
from samestep._util.text import ranks_text
from samestep.errors import InvalidArgumentError, MismatchError, UnavailableError
from samestep.group import json_exchange

_VERSION = "version"


def local_settings(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What this rank is and was given, for `require_equal`; right or wrong.

    Example:
      >>> sorted(local_settings({"SAMESTEP_ALGORITHM": "ring", "HOME": "/root"}))
      ['SAMESTEP_ALGORITHM', 'version']
    """
    given = {
        name: text
        for name, setting in SETTINGS.items()
        if setting.must_agree and (text := get(name, env)) is not None
    }
    return {_VERSION: _settings.VERSION} | given


def require_equal(table: Sequence[Mapping[str, str]], names: Sequence[str]) -> dict[str, str]:
    """The settings `names` that all ranks use, by the `local_settings` of each. Pure: raises on all ranks or none.

    A difference would make ranks wait for ever for messages that nobody sends, or put bytes where they do not belong.

    Raises:
      InvalidArgumentError: a rank was given what means nothing.
      MismatchError: ranks run different versions of samestep, or were given different things; names them.

    Example:
      >>> require_equal([{"SAMESTEP_ALGORITHM": "two_shot"}] * 2, ["SAMESTEP_ALGORITHM", "SAMESTEP_SEGMENT_BYTES"])
      {'SAMESTEP_ALGORITHM': 'two_shot', 'SAMESTEP_SEGMENT_BYTES': ''}
    """
    versions: dict[str, list[int]] = {}
    for rank, given in enumerate(table):
        versions.setdefault(given.get(_VERSION, "unknown"), []).append(rank)
    if len(versions) > 1:
        found = ", ".join(f"{version} on {ranks_text(ranks)}" for version, ranks in versions.items())
        raise MismatchError(f"all ranks need the same version of samestep, but have {found}")
    return {name: _equal(name, [given.get(name) for given in table]) for name in names}


def _equal(name: str, given: Sequence[str | None]) -> str:
    said: dict[str, list[int]] = {}
    for rank, text in enumerate(given):
        try:
            said.setdefault(parse(name, text), []).append(rank)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{error} on rank {rank}") from None
    if len(said) > 1:
        values = ", ".join(f"{text or 'not set'} on {ranks_text(ranks)}" for text, ranks in said.items())
        raise MismatchError(f"{name} has to be the same on all ranks, but is {values}")
    return next(iter(said))


if TYPE_CHECKING:
    from samestep.rendezvous.local_links import Listener

_WORD_NBYTES = 8
_FLAT = {"mpi": "mpi", "native": "tcp"}


def requested_transport(backend: str, agreed: Mapping[str, str]) -> str:
    """The transport that the settings, equal on all ranks, request; or "auto". Pure.

    Raises:
      InvalidArgumentError: the settings exclude each other.

    Example:
      >>> requested_transport("native", {"SAMESTEP_NATIVE_TRANSPORT": "tcp"})
      'tcp'
    """
    variable = _settings.TRANSPORTS[backend]
    transport = agreed[variable]
    if agreed.get(_settings.GPU_AWARE_MPI) != "1":
        return transport
    if transport not in ("auto", "mpi"):
        raise InvalidArgumentError(
            f"{_settings.GPU_AWARE_MPI}=1 hands messages to MPI, so all ranks have to talk through MPI: leave out "
            f"{variable}={transport}, or set it to mpi"
        )
    return "mpi"


def describe_algorithm() -> str:
    """Describe the algorithm for long buffers, for `samestep doctor`.

    Example:
      >>> import os
      >>> _ = os.environ.pop("SAMESTEP_ALGORITHM", None)
      >>> describe_algorithm()
      'auto: by ranks and bytes (docs/scaling.md)'
    """
    try:
        name = _settings.read(_settings.ALGORITHM)
    except InvalidArgumentError as error:
        return str(error)
    given = f"{name} ({_settings.ALGORITHM}={name})"
    return "auto: by ranks and bytes (docs/scaling.md)" if name == "auto" else given


def choose(backend: str, transport: str, hosts: Sequence[str]) -> str:
    """Choose the kind of transport of a group. Pure: the same on all ranks.

    `transport` is what `requested_transport` said, and `hosts` has the host of each rank.

    Returns:
      "shm" (shared memory of one host), "hierarchical" (shared memory within each host, one exchange between them), or
      "flat" (messages between all ranks).

    Raises:
      UnavailableError: "shm" is asked for on several hosts.

    Example:
      >>> choose("mpi", "auto", ["a", "a", "b", "b"])
      'hierarchical'
      >>> choose("mpi", "auto", ["a", "b"])  # every rank is alone: one level does it
      'flat'
    """
    n_hosts = len(set(hosts))
    if transport == _FLAT[backend]:
        return "flat"
    if n_hosts == 1:
        return "shm"
    if transport == "shm":
        raise UnavailableError(
            f"{_settings.TRANSPORTS[backend]}=shm needs all ranks on one host, but there are {n_hosts}; leave it out, "
            f"or set it to {_FLAT[backend]}"
        )
    return "hierarchical" if transport == "hierarchical" or n_hosts < len(hosts) else "flat"


def describe(backend: str) -> str:
    """Describe the transport that a job would use, for `samestep doctor`.

    Example:
      >>> import os
      >>> _ = os.environ.pop("SAMESTEP_MPI_TRANSPORT", None)
      >>> describe("mpi")
      'auto: shm on one host; on several hierarchical if one of them has several ranks, else mpi'
    """
    try:
        variable, flat = _settings.TRANSPORTS[backend], _FLAT[backend]
        here = {name: _settings.read(name) for name in _settings.must_agree(backend)}
        transport = requested_transport(backend, here)
    except InvalidArgumentError as error:
        return str(error)
    if transport == "auto":
        return f"auto: shm on one host; on several hierarchical if one of them has several ranks, else {flat}"
    return f"{transport} ({variable}={transport})"


def refuse_unencrypted(
    backends: Sequence[str], asked: Sequence[Mapping[str, str]], hosts: Sequence[str]
) -> None:
    """Refuses what `SAMESTEP_ENCRYPT=1` cannot do: the bytes of MPI and NCCL between hosts are theirs. Pure.

    Raises:
      MismatchError: the ranks were given different values.
      UnavailableError: one of the `backends`, of device arrays and of host arrays, is to connect several hosts.
    """
    if len(set(hosts)) == 1:
        return
    if require_equal(asked, [_settings.ENCRYPT])[_settings.ENCRYPT] != "1":
        return
    for backend in backends:
        if backend != "native":
            raise UnavailableError(
                f"{_settings.ENCRYPT}=1 does not encrypt what {backend.upper()} sends between hosts: initialize with "
                "NativeBackend; or encrypt the network, as with WireGuard or IPsec, and leave the variable out"
            )


def select_transport(
    comm: _core.Communicator,
    backend: str,
    asked: Sequence[Mapping[str, str]],
    hosts: Sequence[str],
    timeout: float,
) -> tuple[_core.Communicator, _core.Communicator | None]:
    """Select the fastest transport between the ranks of `comm`, before its first long message. Collective.

    `asked` has the `local_settings` of each rank; `require_equal`, `requested_transport` and `choose` raise.

    Returns:
      `comm` itself and None; or the new communicator and `comm`, which has to stay open as its base.
    """
    if comm.size == 1 or comm.transport == "shm":  # for which the settings have been compared
        return comm, None
    agreed = require_equal(asked, _settings.must_agree(backend))
    transport = choose(backend, requested_transport(backend, agreed), hosts)
    comm.configure(
        algorithm=agreed[_settings.ALGORITHM],
        segment_bytes=int(agreed[_settings.SEGMENT_BYTES] or 0),
        max_message=int(agreed.get(_settings.MPI_MAX_MESSAGE) or 0),
    )
    if len(set(hosts)) > 1:
        comm.configure(hosts=[host.partition("/")[0] for host in hosts])
    if backend == "mpi" and transport != "shm":  # which watches the processes of its host itself
        from samestep.world import mpi_world

        mpi_world.begin(comm, hosts, timeout)
    if transport == "flat":
        return comm, None
    if transport == "shm":
        exchange = functools.partial(json_exchange.allgather_bytes, comm, timeout=timeout)
        return open_node_world(comm.name, comm.rank, comm.size, exchange, timeout), comm
    return _open_hierarchical_world(comm, hosts, timeout), comm


def open_node_world(
    name: str,
    rank: int,
    size: int,
    exchange: Callable[[bytes], list[bytes]],
    timeout: float,
    *,
    listener: Listener | None = None,
) -> _core.Communicator:
    """The group of all ranks, which run on one host. `exchange` and `listener`: as in `local_links.connect_all`.

    Collective.
    """
    deadline = Deadline(timeout)
    links, probes = _connected(rank, size, exchange, timeout, listener)
    return _core.open_node_world(name, rank, links, probes, deadline.left(), timeout)


def with_probe(introduction: bytes) -> bytes:
    """What a rank says to the others of its host: where they probe its memory, and a `Listener.introduction`."""
    return _core.probe_address().to_bytes(_WORD_NBYTES, "little") + introduction


def _connected(
    rank: int, size: int, exchange: Callable[[bytes], list[bytes]], timeout: float, listener: Listener | None
) -> tuple[list[int], list[int]]:
    """The descriptors of the connections with each rank of this host, and where its memory is probed."""
    from samestep.rendezvous import local_links

    probes: list[int] = []

    def tell(introduction: bytes) -> list[bytes]:
        said = exchange(with_probe(introduction))
        probes.extend(int.from_bytes(words[:_WORD_NBYTES], "little") for words in said)
        return [words[_WORD_NBYTES:] for words in said]

    links = local_links.connect_all(rank, size, tell, timeout, listener)
    return [-1 if link is None else link.detach() for link in links], probes


def _open_hierarchical_world(
    flat: _core.Communicator, hosts: Sequence[str], timeout: float
) -> _core.Communicator:
    order = list(dict.fromkeys(hosts))
    numbers = [order.index(host) for host in hosts]
    here = [rank for rank, number in enumerate(numbers) if number == numbers[flat.rank]]

    def exchange(data: bytes) -> list[bytes]:
        # With all ranks: a group of those here would be made by MPI, which spins without yielding the CPU.
        everything = json_exchange.allgather_bytes(flat, data, timeout)
        return [everything[rank] for rank in here]

    me = here.index(flat.rank)
    deadline = Deadline(timeout)
    links, probes = _connected(me, len(here), exchange, timeout, None)
    host = _core.open_local_peers(me, links, probes, deadline.left(), timeout)
    return _core.open_hierarchical_world(flat, numbers, host if len(here) > 1 else None, deadline.left())

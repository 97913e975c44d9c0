"""Ranks of several hosts: what carries their bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from samestep import _core, gpu_aware
from samestep.errors import InvalidArgumentError, MismatchError, UnavailableError
from samestep.objects import exchange_objects

__all__ = [
    "ALGORITHM",
    "VARIABLES",
    "algorithm",
    "choose",
    "describe",
    "describe_algorithm",
    "open_above",
    "wanted",
]

VARIABLES = {"mpi": "SAMESTEP_MPI_ENGINE", "native": "SAMESTEP_NATIVE_ENGINE"}
"""Of each backend, the variable that overrides the choice."""

ALGORITHM = "SAMESTEP_ALGORITHM"
"""How long buffers are reduced over messages: what overrides the choice."""

_ALGORITHMS = ("auto", "direct", "halving", "doubling")
_FLAT = {"mpi": "direct", "native": "tcp"}


def wanted(backend: str) -> str:
    """What this rank's environment asks for; `choose` says whether it means anything.

    Args:
      backend: "mpi" or "native".

    Raises:
      InvalidArgumentError: it asks for things that exclude each other.
    """
    engine = os.environ.get(VARIABLES[backend], "auto")
    if backend != "mpi" or gpu_aware.wanted(os.environ) != "1":
        return engine
    if engine not in ("auto", "direct"):
        raise InvalidArgumentError(
            f"{gpu_aware.VARIABLE}=1 hands messages to MPI, so all ranks have to talk through MPI: leave out "
            f"{VARIABLES[backend]}={engine}, or set it to direct"
        )
    return "direct"


def algorithm() -> str:
    """How the environment wants long buffers to be reduced over messages; the same on all ranks.

    Returns:
      "direct", "halving", "doubling", or "auto": what the number of ranks and bytes make the cheapest.

    Raises:
      InvalidArgumentError: it asks for something else.

    Example:
      >>> import os
      >>> _ = os.environ.pop("SAMESTEP_ALGORITHM", None)
      >>> algorithm()
      'auto'
    """
    name = os.environ.get(ALGORITHM, "auto")
    if name not in _ALGORITHMS:
        raise InvalidArgumentError(f"{ALGORITHM} must be auto, direct, halving or doubling, got {name!r}")
    return name


def describe_algorithm() -> str:
    """How long buffers would be reduced over messages, for `samestep doctor`.

    Example:
      >>> import os
      >>> _ = os.environ.pop("SAMESTEP_ALGORITHM", None)
      >>> describe_algorithm()
      'auto: by ranks and bytes (docs/scaling.md)'
    """
    try:
        name = algorithm()
    except InvalidArgumentError as error:
        return str(error)
    return "auto: by ranks and bytes (docs/scaling.md)" if name == "auto" else f"{name} ({ALGORITHM}={name})"


def choose(backend: str, asked: Sequence[str], hosts: Sequence[str]) -> str:
    """What carries the bytes of a world. Pure: the same on all ranks.

    Args:
      backend: "mpi" or "native".
      asked: what `wanted` said on each rank.
      hosts: the host of each rank.

    Returns:
      "node" (shared memory of one host), "hier" (shared memory within each host, one exchange between them), or
      "flat" (every rank for itself).

    Raises:
      InvalidArgumentError: a rank asks for something else.
      MismatchError: the ranks ask for different things.
      UnavailableError: "node" is asked for on several hosts.

    Example:
      >>> choose("mpi", ["auto"] * 4, ["a", "a", "b", "b"])
      'hier'
      >>> choose("mpi", ["auto"] * 2, ["a", "b"])  # every rank is alone: one level does it
      'flat'
    """
    variable, engine = VARIABLES[backend], asked[0]
    known = ("auto", "node", "hier", _FLAT[backend])
    for rank, other in enumerate(asked):
        if other not in known:
            names = f"{', '.join(known[:-1])} or {known[-1]}"
            raise InvalidArgumentError(f"{variable} must be {names}, got {other!r} on rank {rank}")
        if other != engine:
            raise MismatchError(f"{variable} is {engine} on rank 0 but {other} on rank {rank}")
    n_hosts = len(set(hosts))
    if engine == _FLAT[backend]:
        return "flat"
    if n_hosts == 1:
        return "node"
    if engine == "node":
        raise UnavailableError(
            f"{variable}=node needs all ranks on one host, but there are {n_hosts}; leave it out, or set it to "
            f"{_FLAT[backend]}"
        )
    return "hier" if engine == "hier" or n_hosts < len(hosts) else "flat"


def describe(backend: str) -> str:
    """How the ranks of a job would talk, for `samestep doctor`.

    Example:
      >>> import os
      >>> _ = os.environ.pop("SAMESTEP_MPI_ENGINE", None)
      >>> describe("mpi")
      'auto: node on one host; on several hier if one of them has several ranks, else direct'
    """
    try:
        variable, engine, flat = VARIABLES[backend], wanted(backend), _FLAT[backend]
    except InvalidArgumentError as error:
        return str(error)
    if engine == "auto":
        return f"auto: node on one host; on several hier if one of them has several ranks, else {flat}"
    return f"{engine} ({variable}={engine})"


def open_above(
    comm: _core.Communicator, backend: str, asked: Sequence[str], hosts: Sequence[str], timeout: float
) -> tuple[_core.Communicator, _core.Communicator | None]:
    """The engine that serves the ranks of `comm` best. Collective.

    Args:
      comm: any group.
      backend, asked, hosts: as in `choose`, which says what can be wrong with them.
      timeout: seconds for all to come.

    Returns:
      `comm` itself and None, or what was made of it and `comm`, which has to stay open beneath.
    """
    if comm.size == 1 or comm.engine == "node":
        return comm, None
    engine = choose(backend, asked, hosts)
    if len(set(hosts)) > 1:
        comm.set_hosts([host.partition("/")[0] for host in hosts])
        if backend == "mpi":
            from samestep.rendezvous import mpi_hosts

            mpi_hosts.begin(comm, hosts, timeout)
    if engine == "flat":
        return comm, None
    made = _open_node(comm, timeout) if engine == "node" else _open_levels(comm, hosts, timeout)
    return made, comm


def _open_node(flat: _core.Communicator, timeout: float) -> _core.Communicator:
    def exchange(mine: bytes) -> list[bytes]:
        return exchange_objects(flat, mine, timeout)

    return _core.open_node_world(flat.name, flat.rank, flat.size, exchange, timeout)


def _open_levels(flat: _core.Communicator, hosts: Sequence[str], timeout: float) -> _core.Communicator:
    order = list(dict.fromkeys(hosts))
    numbers = [order.index(host) for host in hosts]
    here = [rank for rank, number in enumerate(numbers) if number == numbers[flat.rank]]

    def exchange(data: bytes) -> list[bytes]:
        # With all ranks: a group of those here would be made by MPI, which spins without giving way.
        everything = exchange_objects(flat, data, timeout)
        return [everything[rank] for rank in here]

    host = _core.meet_host(here.index(flat.rank), len(here), exchange, timeout)
    return _core.open_levels(flat, numbers, host if len(here) > 1 else None, timeout)

"""Ranks of several hosts: what carries their bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from samestep import _core, terms
from samestep.errors import InvalidArgumentError, UnavailableError
from samestep.objects import exchange_objects

__all__ = ["choose", "describe", "describe_algorithm", "engine_of", "open_above"]

_FLAT = {"mpi": "direct", "native": "tcp"}


def engine_of(backend: str, agreed: Mapping[str, str]) -> str:
    """The engine that was asked for, or "auto". Pure.

    Args:
      backend: "mpi" or "native".
      agreed: what all ranks go by, as `terms.agreed` has it.

    Raises:
      InvalidArgumentError: they ask for things that exclude each other.

    Example:
      >>> engine_of("native", {"SAMESTEP_NATIVE_ENGINE": "tcp"})
      'tcp'
    """
    variable = terms.ENGINES[backend]
    engine = agreed[variable]
    if agreed.get(terms.GPU_AWARE) != "1":
        return engine
    if engine not in ("auto", "direct"):
        raise InvalidArgumentError(
            f"{terms.GPU_AWARE}=1 hands messages to MPI, so all ranks have to talk through MPI: leave out "
            f"{variable}={engine}, or set it to direct"
        )
    return "direct"


def describe_algorithm() -> str:
    """How long buffers would be reduced over messages, for `samestep doctor`.

    Example:
      >>> import os
      >>> _ = os.environ.pop("SAMESTEP_ALGORITHM", None)
      >>> describe_algorithm()
      'auto: by ranks and bytes (docs/scaling.md)'
    """
    try:
        name = terms.meaning(terms.ALGORITHM, os.environ.get(terms.ALGORITHM))
    except InvalidArgumentError as error:
        return str(error)
    given = f"{name} ({terms.ALGORITHM}={name})"
    return "auto: by ranks and bytes (docs/scaling.md)" if name == "auto" else given


def choose(backend: str, engine: str, hosts: Sequence[str]) -> str:
    """What carries the bytes of a world. Pure: the same on all ranks.

    Args:
      backend: "mpi" or "native".
      engine: what `engine_of` said.
      hosts: the host of each rank.

    Returns:
      "node" (shared memory of one host), "hier" (shared memory within each host, one exchange between them), or
      "flat" (every rank for itself).

    Raises:
      UnavailableError: "node" is asked for on several hosts.

    Example:
      >>> choose("mpi", "auto", ["a", "a", "b", "b"])
      'hier'
      >>> choose("mpi", "auto", ["a", "b"])  # every rank is alone: one level does it
      'flat'
    """
    n_hosts = len(set(hosts))
    if engine == _FLAT[backend]:
        return "flat"
    if n_hosts == 1:
        return "node"
    if engine == "node":
        raise UnavailableError(
            f"{terms.ENGINES[backend]}=node needs all ranks on one host, but there are {n_hosts}; leave it out, or "
            f"set it to {_FLAT[backend]}"
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
        variable, flat = terms.ENGINES[backend], _FLAT[backend]
        here = {name: terms.meaning(name, os.environ.get(name)) for name in terms.OVER[backend]}
        engine = engine_of(backend, here)
    except InvalidArgumentError as error:
        return str(error)
    if engine == "auto":
        return f"auto: node on one host; on several hier if one of them has several ranks, else {flat}"
    return f"{engine} ({variable}={engine})"


def open_above(
    comm: _core.Communicator,
    backend: str,
    asked: Sequence[Mapping[str, str]],
    hosts: Sequence[str],
    timeout: float,
) -> tuple[_core.Communicator, _core.Communicator | None]:
    """The engine that serves the ranks of `comm` best. Collective.

    Args:
      comm: any group, in which nothing long has been sent yet.
      backend, hosts: as in `choose`.
      asked: what `terms.asked` said on each rank; `terms.agreed`, `engine_of` and `choose` say what can be wrong.
      timeout: seconds for all to come.

    Returns:
      `comm` itself and None, or what was made of it and `comm`, which has to stay open beneath.
    """
    if comm.size == 1:
        return comm, None
    agreed = terms.agreed(asked, terms.OVER[backend])
    if comm.engine == "node":
        return comm, None
    engine = choose(backend, engine_of(backend, agreed), hosts)
    comm.set_terms(
        agreed[terms.ALGORITHM],
        int(agreed[terms.WINDOW_PIECE] or 0),
        int(agreed.get(terms.MPI_PIECE) or 0),
    )
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

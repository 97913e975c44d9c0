"""The ranks of a job without MPI."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from samestep import _core, _settings
from samestep._util import descriptors, handshake, launchers
from samestep._util.at_failure import at_failure
from samestep._util.json_layout import Map
from samestep.errors import Error, InvalidArgumentError, UnavailableError
from samestep.group import hosts
from samestep.rendezvous import interfaces, local_links, mesh, pmi
from samestep.rendezvous.file_store import FileStore
from samestep.rendezvous.rendezvous import Rendezvous, join, open_rendezvous
from samestep.world import opening, transports
from samestep.world.choice import check_claims

_LAYOUT = [str, Map(str)]


def open_world(
    method: str | None,
    rank: int | None,
    world_size: int | None,
    timeout: float,
    *,
    met: Rendezvous | None = None,
    alone: bool = False,
) -> tuple[_core.Communicator, bool]:
    """Brings the ranks of the job together. Collective.

    Where they have met is free for others as soon as rank 0 makes its first call over the communicator.

    Args:
      method: as in `open_rendezvous`; None = `env://` where a launcher started several ranks, else a world of one.
      rank, world_size: of this rank; None = as the launcher says. They win over its variables where `method`
        is given, and have to agree with it where it is not.
      timeout: seconds for all to come.
      met: the ranks, where their launcher has said who they are.
      alone: the others go on without this rank for now.

    Returns:
      As `communicator_over`.

    Raises:
      InvalidArgumentError, MismatchError, TimeoutError, UnavailableError: as `open_rendezvous`.
      UnavailableError: ranks cannot reach each other, the launcher names no address, or no descriptor is left.
    """
    try:
        interfaces.check_names(os.environ)
        started_by, env = launchers.launcher(), launchers.own_variables()
        if method is None:
            _check_claims(started_by, rank, world_size)
            if met is not None:
                return communicator_over(met, met.seconds)
            if alone or (world_size or started_by.size) == 1:
                return _core.make_self_communicator("world"), True
            tells_place = "MASTER_PORT" in env or launchers.slurm_meeting(env) is not None
            if started_by.name in launchers.MPI_LAUNCHERS and not tells_place:
                return _over(meet_by_launcher(started_by, timeout), timeout)
        return _over(open_rendezvous(method or "env://", rank, world_size, timeout), timeout)
    except OSError as error:
        if isinstance(error, Error) or not descriptors.are_used_up(error):
            raise
        raise UnavailableError(f"initialize: {descriptors.reason(error)}") from error


def meet_by_launcher(started_by: launchers.Launcher, timeout: float) -> Rendezvous:
    """The ranks of Hydra or, on one host, of Open MPI's mpirun: they meet by what it tells them. Collective."""
    if pmi.FD in os.environ:
        address = interfaces.own_address("", os.environ, several_hosts=True)
        return join(*pmi.open_store(os.environ, timeout, address), timeout, owned=True)
    folder = launchers.folder_of_job()
    if not folder:
        n = started_by.size
        raise UnavailableError(
            f"NativeBackend cannot bring the {n} ranks of this launcher ({started_by.variable}={n}) together: "
            "MASTER_ADDR and MASTER_PORT are not set, and no other place to meet is known, such as Open MPI's mpirun "
            f"has on one host. Start with `samestep run -n {n} script.py`; or set both, to a free port of rank 0's "
            "host; or use samestep.MPIBackend (pip install 'samestep[mpi]'), for which `mpirun -n "
            f"{n} python script.py` is one way to start"
        )
    # The launcher's daemon has a folder for several jobs: those of MPI_Comm_spawn.
    job = os.environ["PMIX_NAMESPACE"].replace("/", "-")
    store = FileStore(os.path.join(os.path.abspath(folder), f"samestep-{job}"), timeout=timeout)
    return join(store, started_by.rank, started_by.size, timeout, owned=True)


def _over(rendezvous: Rendezvous, timeout: float) -> tuple[_core.Communicator, bool]:
    with at_failure(rendezvous.close):
        found = communicator_over(rendezvous, timeout)
    rendezvous.close(timeout)  # by then the others have, too, or are on their way
    return found


class Introduced(NamedTuple):
    """What the ranks have told each other before they open a group, by rank."""

    hosts: list[str]
    asked: list[dict[str, str]]
    """Their `local_settings`."""
    listener: local_links.Listener | None
    introductions: list[bytes]
    """`transports.with_probe` of the listeners of all."""


def communicator_over(
    rendezvous: Rendezvous, timeout: float, name: str = "world", introduced: Introduced | None = None
) -> tuple[_core.Communicator, bool]:
    """The communicator of all ranks of a rendezvous: shared memory on one host, TCP between several. Collective.

    `transports.select_transport` then selects the transport, and applies the settings that the ranks have agreed on.
    Raises as `open_world`. Without `introduced` the ranks tell each other.

    Returns:
      The communicator, and whether the ranks have proved to each other that they belong to one job or, by the
      kernel's word, to one user of this host.
    """
    if rendezvous.size == 1:
        _core.discard_abandoned_groups()
        return _core.make_self_communicator(name), True
    exchange: Callable[[bytes], list[bytes]] = rendezvous.allgather_bytes
    listener = None
    if introduced is None:
        table = rendezvous.allgather_json([hosts.host_identity(), transports.local_settings()], _LAYOUT)
        everywhere, given = [host for host, _ in table], [asked for _, asked in table]
    else:
        everywhere, given, listener, introductions = introduced
        exchange = lambda _: introductions  # noqa: E731
    _core.discard_abandoned_groups()  # those before this one, which the ranks have left before they came here
    agreed = transports.require_equal(given, _settings.must_agree("native"))
    if transports.choose("native", transports.requested_transport("native", agreed), everywhere) == "shm":
        return transports.open_node_world(
            name, rendezvous.rank, rendezvous.size, exchange, timeout, listener=listener
        ), True
    names = [host.partition("/")[0] for host in everywhere]
    address = interfaces.own_address(rendezvous.master, os.environ, several_hosts=len(set(everywhere)) > 1)
    encrypt = agreed[_settings.ENCRYPT] == "1"
    hindrance = hindrance_of_encryption(rendezvous) if encrypt else ""
    found = mesh.connect_all(rendezvous, address, names, timeout, hindrance)
    peers = [(-1 if link.socket is None else link.socket.detach(), link.where) for link in found]
    proved = rendezvous.private or bool(handshake.job_secret())
    keys = [[link.keys for link in found]] if encrypt else []
    return _core.open_tcp_world(name, rendezvous.rank, peers, *keys), proved


def hindrance_of_encryption(rendezvous: Rendezvous) -> str:
    """Why this rank cannot encrypt; or nothing."""
    wanted = f"{_settings.ENCRYPT}=1: rank {rendezvous.rank}"
    if not rendezvous.private and not handshake.job_secret():
        return (
            f"{wanted} has no secret that only this job knows, and keys are derived from it: set {_settings.SECRET} "
            "to the same random text on all ranks"
        )
    try:
        _core.encryption_library()
    except UnavailableError as error:
        return f"{wanted} cannot encrypt: {error}"
    return ""


def group_over(rendezvous: Rendezvous, timeout: float, name: str) -> opening.Opened:
    """A new group of all ranks of a rendezvous, configured like a world. Collective; raises as `open_world`."""
    mine = opening.own_facts(bool(handshake.job_secret()))
    table = [mine] if rendezvous.size == 1 else rendezvous.allgather_json(mine, opening.FACTS)
    comm, proved = communicator_over(rendezvous, timeout, name)
    return opening.open_over(
        comm, "native", [opening.RankFacts(*row) for row in table], timeout, proved=proved
    )


def _check_claims(started_by: launchers.Launcher, rank: int | None, world_size: int | None) -> None:
    if not started_by.name:
        if rank is not None and rank >= (world_size or 1):
            raise InvalidArgumentError(f"initialize: rank={rank} is outside a world of {world_size or 1}")
        if (world_size or 1) > 1 and "MASTER_PORT" not in os.environ:
            raise InvalidArgumentError(
                f"initialize: world_size={world_size}, but nothing says where the ranks meet: start with `samestep run "
                f"-n {world_size} script.py`; or give init_method, such as tcp://host:port of rank 0, and rank"
            )
        return
    claims = [("rank", rank, started_by.rank), ("world_size", world_size, started_by.size)]
    check_claims("initialize", f"the launcher ({started_by.name})", claims)

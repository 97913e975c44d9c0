"""The ranks of a job without MPI."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

from samestep import _core, facts, hosts
from samestep.errors import InvalidArgumentError, UnavailableError
from samestep.rendezvous.meeting import Meeting, meet

__all__ = ["check_interfaces", "open_world"]


def open_world(
    method: str | None, rank: int | None, world_size: int | None, timeout: float
) -> tuple[_core.Communicator, Callable[[], None]]:
    """Brings the ranks of the job together. Collective.

    Args:
      method: as in `meet`; None = `env://` where a launcher started several ranks, else a world of one.
      rank, world_size: of this rank; None = as the launcher says. They win over its variables where `method`
        is given, and have to agree with it where it is not.
      timeout: seconds for all to come.

    Returns:
      The communicator, and what to call when it has ended.

    Raises:
      InvalidArgumentError, MismatchError, TimeoutError, UnavailableError: as `meet`.
      UnavailableError: the ranks are on several hosts, or the launcher says no place to meet.
    """
    check_interfaces(os.environ)
    started_by = facts.launcher()
    if method is None:
        _check_claims(started_by, rank, world_size)
        if (world_size or started_by.size) == 1:
            return _core.make_self_communicator("world"), _nothing
        if "MASTER_PORT" not in os.environ and started_by.name in facts.MPI_LAUNCHERS:
            raise UnavailableError(_no_place(started_by))
    meeting = meet(method or "env://", rank, world_size, timeout)
    try:
        return _communicator(meeting, timeout), meeting.close
    except BaseException:
        meeting.close()
        raise


def _nothing() -> None:
    pass


def _communicator(meeting: Meeting, timeout: float) -> _core.Communicator:
    if meeting.size == 1:
        return _core.make_self_communicator("world")
    where = [host.decode() for host in meeting.exchange(hosts.host_identity().encode())]
    names = list(dict.fromkeys(where))
    if len(names) > 1:
        raise UnavailableError(
            f"the {meeting.size} ranks are on {len(names)} hosts ({', '.join(n.partition('/')[0] for n in names)}), "
            "and NativeBackend carries one host in this version: MPI carries several; start with "
            "`samestep run --hosts a:2,b:2 --mpi script.py` or mpirun"
        )
    return _core.open_node_world("world", meeting.rank, meeting.size, meeting.exchange, timeout)


def _check_claims(started_by: facts.Launcher, rank: int | None, world_size: int | None) -> None:
    if not started_by.name:
        if rank is not None and rank >= (world_size or 1):
            raise InvalidArgumentError(f"initialize: rank={rank} is outside a world of {world_size or 1}")
        if (world_size or 1) > 1 and "MASTER_PORT" not in os.environ:
            raise InvalidArgumentError(
                f"initialize: world_size={world_size}, but nothing says where the ranks meet: start with `samestep run "
                f"-n {world_size} script.py`; or give init_method, such as tcp://host:port of rank 0, and rank"
            )
        return
    for what, claimed, actual in (
        ("rank", rank, started_by.rank),
        ("world_size", world_size, started_by.size),
    ):
        if claimed is not None and claimed != actual:
            raise InvalidArgumentError(
                f"initialize: {what}={claimed} was given but the launcher ({started_by.name}) made it {actual}; "
                f"leave {what} out"
            )


def _no_place(started_by: facts.Launcher) -> str:
    n = started_by.size
    return (
        f"NativeBackend cannot bring the {n} ranks of this launcher ({started_by.variable}={n}) together: MASTER_ADDR "
        f"and MASTER_PORT are not set. Start with `samestep run -n {n} script.py`; or set both, to a free port of rank "
        f"0's host; or use samestep.MPIBackend, for which `mpirun -n {n} python script.py` is one way to start"
    )


def check_interfaces(env: Mapping[str, str]) -> None:
    """Checks that the network interfaces that the user names exist.

    Raises:
      InvalidArgumentError: names the one that does not, and those that do.
    """
    for variable in ("SAMESTEP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if env.get(variable):
            existing = [name for _, name in socket.if_nameindex()]
            for name in env[variable].split(","):
                if name.strip() not in existing:
                    raise InvalidArgumentError(
                        f"{variable} names the interface {name.strip()!r}, but there are {', '.join(existing)}"
                    )
            return

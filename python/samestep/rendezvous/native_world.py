"""The ranks of a job without MPI."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping

from samestep import _core, facts, hosts, levels, terms
from samestep.errors import InvalidArgumentError, UnavailableError
from samestep.rendezvous import interfaces, links
from samestep.rendezvous.meeting import Meeting, meet

__all__ = ["communicator_over", "open_world"]


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
      UnavailableError: ranks cannot reach each other, or the launcher says no place to meet.
    """
    interfaces.check_names(os.environ)
    started_by = facts.launcher()
    if method is None:
        _check_claims(started_by, rank, world_size)
        if not started_by.name and rank is None and world_size is None:
            _check_half_set(os.environ)
        if (world_size or started_by.size) == 1:
            return _core.make_self_communicator("world"), _nothing
        tells_place = "MASTER_PORT" in os.environ or facts.slurm_meeting() is not None
        if started_by.name in facts.MPI_LAUNCHERS and not tells_place:
            raise UnavailableError(_no_place(started_by))
    meeting = meet(method or "env://", rank, world_size, timeout)
    try:
        return communicator_over(meeting, timeout), meeting.close
    except BaseException:
        meeting.close()
        raise


def _nothing() -> None:
    pass


def communicator_over(meeting: Meeting, timeout: float, name: str = "world") -> _core.Communicator:
    """The communicator of all ranks of a meeting: shared memory on one host, TCP between several. Collective.

    `levels.open_above` makes of it what serves best, and sets what ranks have agreed on.

    Args:
      meeting: of the ranks; used until this returns.
      timeout: seconds for all to reach each other.
      name: of the group, for messages.

    Raises:
      InvalidArgumentError, MismatchError, TimeoutError, UnavailableError: as `open_world`.
    """
    if meeting.size == 1:
        return _core.make_self_communicator(name)
    mine = json.dumps([hosts.host_identity(), terms.asked()])
    table = [json.loads(entry) for entry in meeting.exchange(mine.encode())]
    everywhere = [host for host, _ in table]
    agreed = terms.agreed([asked for _, asked in table], terms.OVER["native"])
    if levels.choose("native", levels.engine_of("native", agreed), everywhere) == "node":
        return _core.open_node_world(name, meeting.rank, meeting.size, meeting.exchange, timeout)
    names = [host.partition("/")[0] for host in everywhere]
    address = interfaces.own_address(meeting.master, os.environ, several_hosts=len(set(everywhere)) > 1)
    found = links.connect_all(meeting, address, names, timeout)
    peers = [(-1 if link is None else link.detach(), where) for link, where in found]
    return _core.open_tcp_world(name, meeting.rank, peers)


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


def _check_half_set(env: Mapping[str, str]) -> None:
    """One of RANK and WORLD_SIZE is there: what was meant to be one job would be many worlds of one."""
    for given, harmless, lacking in (("WORLD_SIZE", "1", "RANK"), ("RANK", "0", "WORLD_SIZE")):
        if env.get(given, "").isdecimal() and env[given] != harmless:
            text = f"is {env[lacking]!r}" if lacking in env else "is not set"
            raise InvalidArgumentError(
                f"initialize: variable {given} is {env[given]}, but {lacking} {text}, so that this process would be a "
                f"world of its own. Set both; or neither, to be alone; or start with `samestep run -n N script.py`"
            )


def _no_place(started_by: facts.Launcher) -> str:
    n = started_by.size
    return (
        f"NativeBackend cannot bring the {n} ranks of this launcher ({started_by.variable}={n}) together: MASTER_ADDR "
        f"and MASTER_PORT are not set. Start with `samestep run -n {n} script.py`; or set both, to a free port of rank "
        f"0's host; or use samestep.MPIBackend, for which `mpirun -n {n} python script.py` is one way to start"
    )

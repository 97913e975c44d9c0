"""Makes the backend of a world of ranks that have met, and makes it anew after a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from samestep import _core, _settings
from samestep.backend import Backend, MPIBackend, NativeBackend, NCCLBackend
from samestep.errors import InvalidArgumentError, PeerLostError, TimeoutError, UnavailableError
from samestep.gpu import discovery
from samestep.group import hosts, json_exchange
from samestep.rendezvous.rendezvous import Rendezvous
from samestep.world import opening, transports
from samestep.world.choice import Facts, choose, gather
from samestep.world.member import Member, member

__all__ = ["CLASSES", "assign_device", "gathered", "regroup", "until_met", "world_over"]

CLASSES: dict[str, type[Backend]] = {"mpi": MPIBackend, "nccl": NCCLBackend, "native": NativeBackend}
_T = TypeVar("_T")
_KINDS = (("cuda", "cuda"), ("hip", "amdgpu"))  # of devices, as libraries and as `initialize` call them
_MOST_ATTEMPTS = 8  # to connect the ranks of a job that goes on after a loss
_MOST_OF_NEWCOMERS = 2  # then they end, and the others go on without them


def gathered(arguments: dict[str, Any], *, probe_mpi: bool = False) -> Facts:
    """The facts about this process, without the devices that `arguments`, those of `initialize`, leave alone."""
    wanted = {kind: arguments[f"{name}_devices"] != "missing" for kind, name in _KINDS}
    return gather(probe_mpi=probe_mpi, **wanted)


def world_over(  # noqa: PLR0917 - as they were found, one after the other
    comm: _core.Communicator,
    requested: str,
    host_backend: str,
    known: Facts,
    arguments: dict[str, Any],
    timeout: float,
    proved: bool,
) -> Backend:
    """The backend of ranks that have met, with their devices, over the fastest transport. Collective.

    Raises as `initialize`.

    Args:
      comm: of all ranks, before its first long message.
      requested, host_backend: the backend that was asked for, "" for none, and that of host arrays.
      proved: the ranks have proved to each other that they belong to one job.
    """
    mine = (*opening.own_facts(proved), known.devices, known.nccl_loadable)
    rows = json_exchange.allgather(comm, mine, [*opening.FACTS, int, bool], timeout)
    table = [opening.RankFacts(*row[:-2]) for row in rows]
    devices = [RankDevices(*row[-2:]) for row in rows]
    placement = hosts.locate([facts.host for facts in table], comm.rank)
    backend = _backend_for(requested, host_backend, devices, known)
    here = member()
    # Ranks that go on after a loss keep their devices, and one that is started again has that of the lost one.
    at = (placement.local_rank, placement.local_size) if here is None else here.launched_as
    device = _assign(known.found, arguments, *at)
    opened = opening.open_over(comm, host_backend, table, timeout, of_devices=backend)
    comm = opened.comm
    kind = known.found.kind if known.found is not None else "cuda"
    if any(info.devices for info in devices):  # else there is nothing to agree on
        transports.require_equal([facts.asked for facts in table], _settings.must_agree("devices"))
        comm = _with_devices(comm, backend, kind, device, opened.hosts[comm.rank], timeout)
    return opened._replace(comm=comm).as_backend(CLASSES[backend], timeout, device)


class RankDevices(NamedTuple):
    """How many devices one rank sees, and whether it can load NCCL."""

    devices: int
    nccl: bool


def _backend_for(requested: str, host_backend: str, table: list[RankDevices], known: Facts) -> str:
    """The backend, the same on all ranks."""
    if requested not in ("", "nccl"):
        return requested
    can = all(info.devices > 0 and info.nccl for info in table)
    if requested == "nccl":
        if not can:
            known.every_rank_has_device = all(info.devices > 0 for info in table)
            choose(known, "nccl")  # raises where this rank is one of those that lack something
            lacking = [str(rank) for rank, info in enumerate(table) if not info.devices or not info.nccl]
            raise UnavailableError(
                f"NCCLBackend cannot be used: no device, or no NCCL, on rank{'s' * (len(lacking) > 1)} "
                f"{', '.join(lacking)}; use MPIBackend or NativeBackend, or see `samestep doctor` there"
            )
        return "nccl"
    return "nccl" if can and host_backend == "mpi" else host_backend


def _with_devices(  # noqa: PLR0917
    comm: _core.Communicator, backend: str, kind: str, device: int | None, host: str, timeout: float
) -> _core.Communicator:
    """The group that takes device arrays as well, where every rank has a device. Collective."""
    from samestep.gpu import group, runtime

    wants_nccl = backend == "nccl"
    info = group.open_device(kind, device, host, with_nccl=wants_nccl)
    if device is not None and not info.problem:
        runtime.set_current(kind, device)
    table = [
        group.DeviceInfo(*entry) for entry in json_exchange.allgather(comm, info, [str, str, str], timeout)
    ]
    if wants_nccl:
        group.require_all(table)
    elif any(entry.problem for entry in table):
        return comm
    assert device is not None
    return group.open_group(comm, kind, device, timeout, with_nccl=wants_nccl)


def _assign(
    found: discovery.Devices | None, arguments: dict[str, Any], local_rank: int, local_size: int
) -> int | None:
    assigned = None
    for kind, name in _KINDS:
        count = found.count if found is not None and found.kind == kind else 0
        detail = found.detail if found is not None else "not looked for"
        device = assign_device(name, arguments[f"{name}_devices"], local_rank, local_size, count, detail)
        assigned = device if assigned is None else assigned
    return assigned


def assign_device(  # noqa: PLR0917 - as `initialize` has found them
    kind_name: str,
    request: list[int] | str | None,
    local_rank: int,
    local_size: int,
    n_visible: int,
    looked_for: str = "",
) -> int | None:
    """The device of this rank, as an index among the *visible* devices, or None.

    With one visible device per process (a launcher that sets a mask with one entry for each rank) that is 0.

    Args:
      kind_name: "cuda" or "amdgpu", for error texts, as `looked_for` is.
      request: of the user. None: `local_rank` mod `n_visible`, and None without a device; "missing": None; a list: its
        entry for `local_rank`.

    Raises:
      InvalidArgumentError: a list shorter than `local_size`, or an entry below 0.
      UnavailableError: a list, and `n_visible` is 0, or the entry of any rank of this host is not below it: then all
        ranks raise, and none waits for another.

    Example:
      >>> [assign_device("cuda", None, rank, 3, 2) for rank in range(3)]
      [0, 1, 0]
    """
    if isinstance(request, str):
        return None
    if request is None:
        # More ranks than devices share them. Without a device the rank works on the host.
        return local_rank % n_visible if n_visible > 0 else None
    _check_list(kind_name, request, local_size, n_visible, looked_for)
    return request[local_rank]


def _check_list(kind_name: str, devices: list[int], local_size: int, n_visible: int, looked_for: str) -> None:
    """Raise unless each rank of this host can use its entry: so that all of them raise."""
    if len(devices) < local_size:
        raise InvalidArgumentError(
            f"{kind_name}_devices has {len(devices)} entries, but this host has {local_size} ranks: give one device "
            "for each node-local rank"
        )
    for i, device in enumerate(devices):
        if device < 0:
            raise InvalidArgumentError(f"{kind_name}_devices[{i}] is {device}: devices are numbered from 0")
    if n_visible == 0:
        raise UnavailableError(
            f"{kind_name}_devices were given, but this process sees no {kind_name} device: {looked_for}. Cure: leave "
            f"{kind_name}_devices out to run without one"
        )
    for i, device in enumerate(devices[:local_size]):
        if device >= n_visible:
            raise UnavailableError(
                f"{kind_name}_devices[{i}] is {device}, but this process sees {n_visible} {kind_name} "
                f"device{'s' * (n_visible != 1)}, numbered from 0. A mask such as CUDA_VISIBLE_DEVICES hides devices "
                "and numbers the others anew; where the launcher gives each rank a device of its own, leave "
                f"{kind_name}_devices out"
            )


def until_met(goes_on: Member, meet: Callable[[], Rendezvous], opened: Callable[[Rendezvous], _T]) -> _T:
    """What `opened` returns with the ranks that have met; again with those that are left, if one is lost meanwhile."""
    while True:
        met = meet()
        try:
            made = opened(met)
        except (PeerLostError, TimeoutError, UnavailableError):
            is_new = goes_on.is_restarted and not goes_on.has_met
            if goes_on.n_attempts >= (_MOST_OF_NEWCOMERS if is_new else _MOST_ATTEMPTS):
                raise
        else:
            goes_on.n_attempts, goes_on.has_met = 0, True
            return made


def regroup(
    world: Backend,
    goes_on: Member,
    arguments: dict[str, Any],
    *,
    step: int = 0,
    clean: bool = True,
    admits: bool = False,
) -> None:
    """Make the group of `world` anew of the ranks that are left, and of newcomers, in the same object. Collective.

    `step`, `clean` and `admits` are those of `samestep.rendezvous.membership.Post`.

    Raises:
      PeerLostError: this rank has been given up.
      UnavailableError: the launcher has ended, or cannot be reached.
    """
    from samestep.world import native_world

    kind = world.kind
    reason = f"epoch {goes_on.record.epoch} of the group has ended"
    closed = list(world._children)
    world._abandon(reason)
    for group in closed:  # so that using one says that it is closed
        group._comm.close(world.timeout)
    known = gathered(arguments)

    def opened(met: Rendezvous) -> Backend:
        comm, proved = native_world.communicator_over(met, met.seconds)
        return world_over(comm, kind, "native", known, arguments, world.timeout, proved)

    def meet() -> Rendezvous:
        return goes_on.meet(world.timeout, step=step, clean=clean, admits=admits)

    world._become(until_met(goes_on, meet, opened))

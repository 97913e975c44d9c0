"""Groups of ranks with a GPU each: the conditions for joining, and the communicator that accepts their arrays."""

from __future__ import annotations

import os
from typing import NamedTuple

from samestep import _core, _settings
from samestep.errors import Error, UnavailableError
from samestep.gpu import mpi_support, nccl_settings
from samestep.gpu.runtime import gpu
from samestep.gpu.runtime import nccl as nccl_of


class DeviceInfo(NamedTuple):
    """What one rank tells the others before device arrays can be used."""

    problem: str
    """Why this rank cannot; "" if it can."""
    nccl: str
    """Version of NCCL or RCCL, "" without it."""
    identity: str
    """The host and the physical device."""


def open_device(kind: str, device: int | None, host: str, *, with_nccl: bool) -> DeviceInfo:
    """Open what this rank needs for its device. Never raises: the ranks compare what they found first."""
    if device is None:
        return DeviceInfo("no device is assigned to it", "", "")
    files = nccl_settings.of_files(os.environ) if with_nccl else {}
    if problem := nccl_settings.problem(os.environ, files) if with_nccl else "":
        return DeviceInfo(problem, "", "")
    if with_nccl:
        os.environ.update(nccl_settings.defaults(os.environ, files))
    try:
        nccl = nccl_of(kind).version if with_nccl else ""
        of_instance = gpu(kind).uuid(device) if with_nccl and _knows_instances(nccl) else ""
        return DeviceInfo("", nccl, identity_of(host, of_instance or gpu(kind).bus_id(device)))
    except Error as error:
        return DeviceInfo(str(error), "", "")


def identity_of(host: str, device: str) -> str:
    """The host and what NCCL distinguishes devices by: NCCL_HOSTID stands for the host."""
    return f"{os.environ.get('NCCL_HOSTID') or host} {device}"


def _knows_instances(nccl: str) -> bool:
    """Whether this version compares UUIDs of devices, which MIG instances of one GPU have of their own."""
    return tuple(int(part) for part in nccl.split(".")) >= (2, 30)


def require_all(table: list[DeviceInfo]) -> None:
    """Raise the same UnavailableError on all ranks where NCCL cannot be used by all of them together. Pure."""
    problems = [f"rank {rank}: {info.problem}" for rank, info in enumerate(table) if info.problem]
    if problems:
        raise UnavailableError(f"NCCLBackend cannot be used. {'; '.join(problems)}")
    versions = {info.nccl: rank for rank, info in reversed(list(enumerate(table)))}
    if len(versions) > 1:
        found = ", ".join(f"{version} on rank {rank}" for version, rank in versions.items())
        raise UnavailableError(
            f"NCCLBackend: all ranks must load the same NCCL, but there is {found}. Cure: install one version in all "
            "environments, or set SAMESTEP_NCCL_LIBRARY to the same file on all ranks"
        )
    _require_own_devices(table)


def _require_own_devices(table: list[DeviceInfo]) -> None:
    sharing: dict[str, list[int]] = {}
    for rank, info in enumerate(table):
        sharing.setdefault(info.identity, []).append(rank)
    ranks = next((ranks for ranks in sharing.values() if len(ranks) > 1), None)
    may_share = _knows_instances(table[0].nccl) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if ranks is None or may_share:
        return
    device = table[ranks[0]].identity.split()[-1]
    raise UnavailableError(
        f"NCCLBackend: ranks {' and '.join(map(str, ranks))} use the same device ({device}), which NCCL "
        f"{table[0].nccl} refuses. Cure: start as many ranks as there are devices; or use NCCL 2.30 or newer, which "
        "tells MIG instances apart, and takes other devices with NCCL_MULTI_RANK_GPU_ENABLE=1; or samestep.MPIBackend "
        "or NativeBackend, which take device arrays too; or, for tests, give each rank an NCCL_HOSTID of its own"
    )


def open_group(
    comm: _core.Communicator, kind: str, device: int, timeout: float, *, with_nccl: bool
) -> _core.Communicator:
    """The group of `comm` that takes arrays of `device` as well. Collective."""
    nccl = nccl_of(kind) if with_nccl else None
    piece = int(_settings.get(_settings.STAGING_BYTES) or "0")
    direct = comm.transport == "mpi" and mpi_support.decide(kind, device)[0]
    return _core.open_devices(comm, gpu(kind), device, nccl, piece, timeout, direct)

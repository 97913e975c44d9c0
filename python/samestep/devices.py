"""The GPU of this rank: which it is, the runtime that reaches it, and the groups that take its arrays."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, NamedTuple

from samestep import _core, accelerators, gpu_aware, packing, terms
from samestep.errors import Error, UnavailableError

__all__ = ["Joined", "gpu", "join", "open_group", "set_current"]

_CURE = "`samestep doctor` shows what was found, and why others were passed over."


class Joined(NamedTuple):
    """What one rank tells the others before device arrays can be used."""

    problem: str
    """Why this rank cannot; "" if it can."""
    nccl: str
    """Version of NCCL or RCCL, "" without it."""
    place: str
    """Host and physical device."""


@functools.cache
def gpu(kind: str) -> _core.GpuLibrary:
    """The runtime of "cuda" or "hip" devices, opened at the first use.

    Raises:
      UnavailableError: there is none; lists where it was looked for.
    """
    found = accelerators.runtime_library(kind)
    if not found.path:
        raise UnavailableError(f"{found.detail}. {_CURE}")
    return _core.GpuLibrary.open("rocm" if kind == "hip" else "cuda", found.path)


@functools.cache
def _nccl(kind: str) -> _core.NcclLibrary:
    found = accelerators.communication_library(kind, may_open=True)
    if not found.path:
        raise UnavailableError(f"{found.detail}. {_CURE}")
    return _core.NcclLibrary.open(found.path)


def current_gpu(kind: str = "") -> _core.GpuLibrary:
    """The runtime that is in use: of "cuda" or "rocm" devices, "" for whichever kind this process has."""
    if not kind:
        kind = _kinds[-1] if _kinds else "cuda"
    return gpu("hip" if kind in ("hip", "rocm") else "cuda")


_kinds: list[str] = []


def set_current(kind: str, device: int) -> None:
    """Make `device` the process's current one, also that of torch and CuPy where they have been imported."""
    gpu(kind).set_device(device)
    _kinds.append(kind)
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(device)
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None:
        cupy.cuda.Device(device).use()


def join(kind: str, device: int | None, host: str, *, with_nccl: bool) -> Joined:
    """Open what this rank needs for its device. Never raises: the ranks compare what they found first."""
    if device is None:
        return Joined("no device is assigned to it", "", "")
    try:
        place = f"{host} {gpu(kind).bus_id(device)}"
        return Joined("", _nccl(kind).version if with_nccl else "", place)
    except Error as error:
        return Joined(str(error), "", "")


def require_all(table: list[Joined]) -> None:
    """Raise the same UnavailableError on all ranks where NCCL cannot be used by all of them together. Pure."""
    problems = [f"rank {rank}: {joined.problem}" for rank, joined in enumerate(table) if joined.problem]
    if problems:
        raise UnavailableError(f"NCCLBackend cannot be used. {'; '.join(problems)}")
    versions = {joined.nccl: rank for rank, joined in reversed(list(enumerate(table)))}
    if len(versions) > 1:
        told = ", ".join(f"{version} on rank {rank}" for version, rank in versions.items())
        raise UnavailableError(
            f"NCCLBackend: all ranks must load the same NCCL, but there is {told}. Cure: install one version in all "
            "environments, or set SAMESTEP_NCCL_LIBRARY to the same file on all ranks"
        )
    _require_own_devices(table)


class DeviceList(NamedTuple):
    """What one rank tells the others before it uses several devices together."""

    places: list[str]
    """Host and physical device of each."""
    may_share: bool
    """Whether its NCCL takes a device that another rank uses too."""


def can_join(table: list[DeviceList]) -> bool:
    """Whether NCCL takes all devices of all ranks together. Pure."""
    places = [place for listed in table for place in listed.places]
    if any(len(set(listed.places)) < len(listed.places) for listed in table):
        return False
    return len(set(places)) == len(places) or all(listed.may_share for listed in table)


def sharing_is_allowed(kind: str) -> bool:
    """Whether NCCL has been told, in this process, to take a device that another rank uses too."""
    return _may_share(_nccl("hip" if kind == "rocm" else "cuda").version)


def _may_share(nccl: str) -> bool:
    if os.environ.get("NCCL_HOSTID"):
        return True
    version = tuple(int(part) for part in nccl.split("."))
    return version >= (2, 30) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def _require_own_devices(table: list[Joined]) -> None:
    sharing: dict[str, list[int]] = {}
    for rank, joined in enumerate(table):
        sharing.setdefault(joined.place, []).append(rank)
    ranks = next((ranks for ranks in sharing.values() if len(ranks) > 1), None)
    if ranks is None or _may_share(table[0].nccl):
        return
    device = table[ranks[0]].place.split()[-1]
    raise UnavailableError(
        f"NCCLBackend: ranks {' and '.join(map(str, ranks))} use the same device ({device}), which NCCL "
        f"{table[0].nccl} refuses. Cure: start as many ranks as there are devices; or use NCCL 2.30 or newer with "
        "NCCL_MULTI_RANK_GPU_ENABLE=1; or samestep.MPIBackend or NativeBackend, which take device arrays too"
    )


def open_group(
    comm: _core.Communicator, kind: str, device: int, timeout: float, *, with_nccl: bool
) -> _core.Communicator:
    """The group of `comm` that takes arrays of `device` as well. Collective.

    Environment: `SAMESTEP_NCCL_CHECK=before` lets ranks compare each operation before it begins, rather than beside
    it; then a difference leaves the group usable. `SAMESTEP_STAGING_PIECE` is how many bytes of a long array go
    through the host at a time (default 4 MiB). `SAMESTEP_PACK_BELOW`: see `packing.below`.
    """
    check = terms.meaning("SAMESTEP_NCCL_CHECK", os.environ.get("SAMESTEP_NCCL_CHECK"))
    nccl = _nccl(kind) if with_nccl else None
    piece = int(os.environ.get("SAMESTEP_STAGING_PIECE", "0"))
    direct = comm.engine == "mpi" and gpu_aware.decide(kind, device)[0]
    limit = packing.below() if with_nccl else 0
    packer = packing.packer(kind, device) if limit else None
    return _core.open_devices(
        comm, gpu(kind), device, nccl, check == "before", piece, timeout, packer, limit, direct
    )

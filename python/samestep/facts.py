"""What is known about this process and machine before a backend is chosen.

Nothing is looked for at import. Starting MPI, and loading what costs time, is left to the backends.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samestep import _core, accelerators

MPI_LAUNCHERS = ("openmpi", "hydra", "slurm")
_OF_PMI = ("PMI_", "PMIX_RANK", "PMIX_NAMESPACE")  # by which an MPI library learns its ranks from srun


@dataclass(frozen=True)
class Launcher:
    """Who started this process as one of several ranks, by the variables it set.

    Attributes:
      name: "openmpi", "hydra" (MPICH and its family), "slurm" (srun, which speaks to MPI), "srun" (which does not),
        "samestep", "torchrun", or "" = nobody.
      size, rank: as the launcher says.
      variable: the one that tells the size; "" for nobody.
    """

    name: str = ""
    size: int = 1
    rank: int = 0
    variable: str = ""


def launcher(env: Mapping[str, str] = os.environ) -> Launcher:
    """The launcher of this process. Pure.

    The batch script of a Slurm job knows the size of the job, too, but is no rank; only a task of `srun` is.
    The variables of an MPI launcher come first, because MPI launchers are started by others more often than
    the reverse.

    Example:
      >>> launcher({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"})
      Launcher(name='openmpi', size=4, rank=1, variable='OMPI_COMM_WORLD_SIZE')
    """
    rows = [("openmpi", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", True)]
    # srun speaks PMI as well; hydra alone sets MPI_LOCALNRANKS.
    rows.append(("hydra", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS" in env or "SLURM_STEP_ID" not in env))
    of_srun = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", _is_task_of_srun(env)
    rows += [("slurm", *of_srun)] if any(name.startswith(_OF_PMI) for name in env) else []
    ours = "SAMESTEP_ERROR_FILE" in env
    rows.append(("samestep" if ours else "torchrun", "WORLD_SIZE", "RANK", True))
    rows.append(("srun", *of_srun))  # without MPI it may have started torchrun, once on each host
    for name, size, rank, condition in rows:
        if condition and env.get(size, "").isdecimal() and env.get(rank, "").isdecimal():
            return Launcher(name, int(env[size]), int(env[rank]), size)
    return Launcher()


def slurm_meeting(env: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Where the ranks of a step of Slurm may meet: its first host, and a port made of the numbers of job and step.

    None for what is no task of `srun`.

    Example:
      >>> slurm_meeting({"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "gpu[03-07,9],cpu1"})
      ('gpu03', 20539)
    """
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    if not _is_task_of_srun(env) or not hosts:
        return None
    first = re.match(r"(?:[^,[]|\[[^]]*\])*", hosts)
    host = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first.group()) if first else hosts
    job, step = (env.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    number = 7 * int(job if job.isdecimal() else 0) + int(step if step.isdecimal() else 0)
    return host, _FIRST_PORT + number % _N_PORTS


_FIRST_PORT, _N_PORTS = 20000, 12000  # below those that kernels give away
_SLURM_SPECIAL_STEP = (
    0xFFFFFFF0  # the steps of batch script, interactive shell and the like are numbered from here
)


def _is_task_of_srun(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return step.isdecimal() and int(step) < _SLURM_SPECIAL_STEP


def visible_devices(*, cuda: bool = True, hip: bool = True) -> list[accelerators.Devices]:
    """What devices of the kinds asked for this process can use, the most numerous kind first."""
    from samestep import accelerators

    found = []
    if cuda:
        found.append(accelerators.cuda_devices())
    if hip:
        found.append(accelerators.hip_devices())
    return sorted(found, key=lambda devices: -devices.count)


def gather(
    *,
    probe_mpi: bool,
    cuda: bool = True,
    hip: bool = True,
    found: Sequence[accelerators.Devices] | None = None,
) -> _core.Facts:
    """The facts that `_core.choose` decides by.

    Args:
      probe_mpi: load the MPI library that mpi4py uses (tens of milliseconds). MPI is not started. Without it
        MPI counts as not loadable.
      cuda, hip: whether to ask for such devices. Asking initialises the driver in this process.
      found: what `visible_devices` has found, if it has been asked.
    """
    from samestep import _core, accelerators

    started_by = launcher()
    facts = _core.Facts(launcher=started_by.name, launcher_size=started_by.size, mpi_detail="not looked for")
    if probe_mpi:
        from samestep.launch import mpi_library

        library = mpi_library.load()
        facts.mpi_loadable, facts.mpi_detail = bool(library.path), library.problem or library.detail
    if found is None:
        found = visible_devices(cuda=cuda, hip=hip)
    best = found[0] if found else None
    facts.devices = best.count if best else 0
    facts.device_detail = (
        best.detail
        if best and best.count
        else "; ".join(devices.detail for devices in found) or "not looked for"
    )
    facts.every_rank_has_device = facts.devices > 0 and started_by.size == 1
    if best:
        nccl = accelerators.communication_library(best.kind, may_open=best.count > 0)
        facts.nccl_loadable, facts.nccl_detail = bool(nccl.path), nccl.detail
    return facts

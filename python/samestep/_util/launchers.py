"""The launcher that started this process as one of several ranks, found by the variables that launchers set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from samestep import _settings

MPI_LAUNCHERS = ("openmpi", "hydra", "slurm")
PMI_FD = "PMI_FD"  # the connection to a process manager that speaks PMI-1
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

    The batch script of a Slurm job knows the size of the job, too, but is not a rank; only a task of `srun` is.
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
    ours = _settings.get(_settings.ERROR_FILE, env) is not None
    rows.append(("samestep" if ours else "torchrun", "WORLD_SIZE", "RANK", True))
    rows.append(("srun", *of_srun))  # without MPI it may have started torchrun, once on each host
    for name, size, rank, condition in rows:
        if condition and env.get(size, "").isdecimal() and env.get(rank, "").isdecimal():
            return Launcher(name, int(env[size]), int(env[rank]), size)
    return Launcher()


def half_set(env: Mapping[str, str] = os.environ) -> str:
    """What is wrong where only one of RANK and WORLD_SIZE is set: each process of the job would run alone; or "". Pure.

    Example:
      >>> half_set({"RANK": "1", "WORLD_SIZE": "2"})
      ''
    """
    for given, harmless, lacking in (("WORLD_SIZE", "1", "RANK"), ("RANK", "0", "WORLD_SIZE")):
        if env.get(given, "").isdecimal() and env[given] != harmless and not env.get(lacking, "").isdecimal():
            text = f"is {env[lacking]!r}" if lacking in env else "is not set"
            return (
                f"variable {given} is {env[given]}, but {lacking} {text}, so that this process would be a world of its "
                "own. Set both; or neither, to be alone; or start with `samestep run -n N script.py`"
            )
    return ""


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

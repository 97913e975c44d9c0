"""The launcher that started this process as one of several ranks, found by the variables that launchers set."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from samestep import _settings

MPI_LAUNCHERS = ("openmpi", "hydra", "slurm")
PMI_FD = "PMI_FD"  # the connection to a process manager that speaks PMI-1
_OF_PMI = ("PMI_", "PMIX_RANK", "PMIX_NAMESPACE")  # by which an MPI library learns its ranks from srun
_TORCHRUN = "TORCHELASTIC_RUN_ID"
# What launchers tell a rank about itself: MPI's, Slurm's, and those that set RANK.
_OF_MPI = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "HYDI_", "MPI_LOCAL", "PALS_")
_MPI_NAMES = ("PRTE_LAUNCHED", "OMPI_FILE_LOCATION", "OMPI_MCA_num_procs", "OMPI_UNIVERSE_SIZE")
_NOT_OF_MPI = "PMIX_MCA_"
_OF_TORCHRUN = "TORCHELASTIC_"
_RANK_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    _settings.LAUNCHER,
    _settings.RANK_PROCESS,
    *(f"{of}_{what}" for of in ("LOCAL", "GROUP", "ROLE") for what in ("RANK", "WORLD_SIZE")),
)
_RANKS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "WORLD_SIZE": "RANK",
}


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


def launcher(
    env: Mapping[str, str] = os.environ, past: Iterable[Mapping[str, str]] | None = None
) -> Launcher:
    """The launcher of this process; the innermost one, where one runs inside another.

    The batch script of a Slurm job knows the size of the job, too, but is not a rank; only a task of `srun` is.

    Args:
      past: the environments with which this process, its parent and so on were started; None: those of this process,
        for `os.environ`, and else unknown. Without them an MPI launcher counts as the inner one.

    Example:
      >>> launcher({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"})
      Launcher(name='openmpi', size=4, rank=1, variable='OMPI_COMM_WORLD_SIZE')
    """
    found, _ = _innermost(env, past)
    return found[0] if found else Launcher()


def own_variables(
    env: Mapping[str, str] = os.environ, past: Iterable[Mapping[str, str]] | None = None
) -> Mapping[str, str]:
    """`env` without the variables of launchers around the one that started this process.

    Example:
      >>> shell = {"RANK": "0", "WORLD_SIZE": "1"}
      >>> own_variables({**shell, "PMI_RANK": "1", "PMI_SIZE": "2"}, [shell])
      {'PMI_RANK': '1', 'PMI_SIZE': '2'}
    """
    found, outer = _innermost(env, past)
    if not outer:
        return env
    env = without_mpi(env) if found[0].variable == "WORLD_SIZE" else _without_rank(env)
    foreign = {name for one in outer for name in (one.variable, _RANKS[one.variable])}
    return {name: value for name, value in env.items() if name not in foreign}


def outside_any_job(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without the variables of an enclosing launcher about the rank of this process.

    Example:
      >>> outside_any_job({"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "RANK": "3", "HOME": "/root"})
      {'HOME': '/root'}
    """
    return {name: value for name, value in _without_rank(without_mpi(env)).items() if name != "SLURM_PROCID"}


def without_mpi(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without what an MPI launcher says to this process about itself."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_NOT_OF_MPI) or not (name.startswith(_OF_MPI) or name in _MPI_NAMES)
    }


def _without_rank(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if not (name.startswith(_OF_TORCHRUN) or name in _RANK_NAMES)
    }


def _candidates(env: Mapping[str, str]) -> list[Launcher]:
    """All launchers whose variables are there; MPI's first, which are the inner ones more often than not."""
    rows = [("openmpi", "OMPI_COMM_WORLD_SIZE", True)]
    # srun speaks PMI as well; hydra alone sets MPI_LOCALNRANKS.
    rows.append(("hydra", "PMI_SIZE", "MPI_LOCALNRANKS" in env or "SLURM_STEP_ID" not in env))
    is_task = _is_task_of_srun(env)
    speaks_mpi = is_task and any(name.startswith(_OF_PMI) for name in env)
    ours = _settings.get(_settings.LAUNCHER, env) is not None and _TORCHRUN not in env
    rows += [
        ("slurm", "SLURM_STEP_NUM_TASKS", is_task and speaks_mpi),
        ("samestep" if ours else "torchrun", "WORLD_SIZE", True),
        # It may have started torchrun, once on each host.
        ("srun", "SLURM_STEP_NUM_TASKS", is_task and not speaks_mpi),
    ]
    return [
        Launcher(name, int(env[size]), int(env[_RANKS[size]]), size)
        for name, size, condition in rows
        if condition and env.get(size, "").isdecimal() and env.get(_RANKS[size], "").isdecimal()
    ]


def _innermost(
    env: Mapping[str, str], past: Iterable[Mapping[str, str]] | None
) -> tuple[list[Launcher], list[Launcher]]:
    """The launchers that may have started this process, the likeliest first, and those around them."""
    found = _candidates(env)
    numbers = {(one.size, one.rank) for one in found}
    # The variables of one launcher are often made of another's, in a script or by `samestep run --mpi`.
    marked = _TORCHRUN in env or _settings.get(_settings.LAUNCHER, env) is not None
    if len(found) < 2 or (len(numbers) == 1 and not marked):
        return found[:1], []
    marks = {one: _identity(one, env) for one in found}
    for before in _own_past() if past is None and env is os.environ else past or ():
        here = [one for one in found if all(before.get(name) == value for name, value in marks[one].items())]
        if 0 < len(here) < len(found):  # what an ancestor had already is of a launcher around the others
            return [one for one in found if one not in here], here
    return found, []


def _identity(one: Launcher, env: Mapping[str, str]) -> dict[str, str]:
    """The variables by which an ancestor is known to be of the same job as this process, and the same rank."""
    names = [one.variable, _RANKS[one.variable]]
    names += ["PMIX_NAMESPACE"] if one.name == "openmpi" else []
    return {name: env[name] for name in names if name in env}


def _own_past() -> Iterator[dict[str, str]]:
    """The environments with which this process and its ancestors were started, as far as they can be read."""
    pid = os.getpid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                words = os.fsdecode(file.read()).split("\0")
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # of another user, or it has ended
            return
        yield {name: value for name, _, value in (word.partition("=") for word in words)}


def problem(env: Mapping[str, str] = os.environ) -> str:
    """What is wrong with the variables of launchers, so that ranks would be alone or not meet; or "".

    Example:
      >>> problem({"RANK": "1", "WORLD_SIZE": "2"})
      ''
    """
    return contradiction(env) or ("" if launcher(env).name else _half_set(env))


def contradiction(
    env: Mapping[str, str] = os.environ, past: Iterable[Mapping[str, str]] | None = None
) -> str:
    """Which variables contradict each other, so that nobody knows which rank this process is; or "".

    Example:
      >>> contradiction({"WORLD_SIZE": "3", "PMI_RANK": "0", "PMI_SIZE": "2"})
      'variable WORLD_SIZE is 3, but the launcher has started 2 ranks (PMI_SIZE=2): unset WORLD_SIZE'
    """
    found, outer = _innermost(env, past)
    if len({(one.size, one.rank) for one in found}) > 1:
        said = "; but ".join(
            " and ".join(f"{n}={v}" for n, v in _identity(one, env).items()) for one in found
        )
        return (
            f"variables contradict each other: {said}. One launcher runs inside another, and which one "
            "has started this process cannot be found out: unset the variables of the other one"
        )
    given = env.get("WORLD_SIZE", "")
    if found and not outer and given.isdecimal() and int(given) not in (1, n := found[0].size):
        return (
            f"variable WORLD_SIZE is {given}, but the launcher has started {n} ranks ({found[0].variable}={n}): unset "
            "WORLD_SIZE"
        )
    return ""


def _half_set(env: Mapping[str, str]) -> str:
    for given, harmless, lacking in (("WORLD_SIZE", "1", "RANK"), ("RANK", "0", "WORLD_SIZE")):
        other = env.get(lacking, "")
        means_something = other or env.get(given) != harmless
        if env.get(given, "").isdecimal() and means_something and not other.isdecimal():
            text = f"is {other!r}" if lacking in env else "is not set"
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
_SLURM_SPECIAL_STEP = 0xFFFFFFF0  # batch script, interactive shell and the like are numbered from here


def folder_of_job(env: Mapping[str, str] = os.environ) -> str:
    """The folder, of this user alone, that Open MPI's launcher keeps for the ranks of a job on one host; or "".

    Example:
      >>> folder_of_job({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_SERVER_TMPDIR": "/tmp"})
      ''
    """
    size, folder = env.get("OMPI_COMM_WORLD_SIZE"), env.get("PMIX_SERVER_TMPDIR", "")
    one_host = size is not None and size == env.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    return folder if one_host and "PMIX_NAMESPACE" in env and os.path.isdir(folder) else ""


def can_meet(started_by: Launcher, env: Mapping[str, str] = os.environ) -> bool:
    """Whether the ranks of an MPI launcher find each other by what it tells them, without MPI."""
    if started_by.name == "slurm":
        return slurm_meeting(env) is not None
    return bool(PMI_FD in env if started_by.name == "hydra" else folder_of_job(env))


def _is_task_of_srun(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return step.isdecimal() and int(step) < _SLURM_SPECIAL_STEP

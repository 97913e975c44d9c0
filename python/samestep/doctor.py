"""`samestep doctor`: what was found on this machine, which backend is chosen, and why; or how a job has started."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from samestep import _core, _settings, internal
from samestep._util import cpus, jax_variables, launchers, mpi_library, unknown_settings
from samestep._util.json_layout import Map
from samestep._util.text import size
from samestep.arrays.numpy_memory import available_memory, usable_memory
from samestep.errors import Error
from samestep.gpu import discovery, mpi_support
from samestep.group import json_exchange
from samestep.launch import mpirun
from samestep.rendezvous import url
from samestep.world import transports
from samestep.world.choice import Facts, choose, gather

_LIBRARIES = ("numpy", "mpi4py", "torch", "jax", "optax", "cupy")
_VARIABLES = ("SAMESTEP_", "MPI4PY_", "CUDA_VISIBLE", "HIP_VISIBLE", "ROCR_VISIBLE", "OMP_NUM_THREADS")
_GREEN, _YELLOW, _BOLD, _PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[1m", "\x1b[0m"

Row = tuple[str, str, "bool | None"]
"""Name, text, and whether that is good; None where neither is better."""


def examine() -> dict[str, Any]:
    """Checks everything. Never raises; the `detail` of what is missing names the cure."""
    known = gather(probe_mpi=False)
    library = mpi_library.probe()  # in another process, which a broken library may take down
    known.mpi_loadable, known.mpi_detail = bool(library.path), library.problem or library.detail
    started_by = launchers.launcher()
    devices = (discovery.cuda_devices(), discovery.hip_devices())
    return {
        "samestep": _settings.VERSION,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "libraries": _versions(),
        "processors": {
            "usable": len(os.sched_getaffinity(0)),
            "all": os.cpu_count(),
            "isa": _core.isa_name(),
        },
        "launcher": dataclasses.asdict(started_by),
        "mpi": {"usable": known.mpi_loadable, "family": library.family, "detail": library.detail},
        "mpirun": _mpirun(),
        "devices": {found.kind: {"count": found.count, "detail": found.detail} for found in devices},
        "runtimes": {
            kind: {"path": (runtime := discovery.runtime_library(kind)).path, "detail": runtime.detail}
            for kind in ("cuda", "hip")
        },
        "network": _network(),
        "gpu_aware": {
            found.kind: mpi_support.describe(found.kind) if found.count else "no device" for found in devices
        },
        "nccl": {"usable": known.nccl_loadable, "detail": known.nccl_detail},
        "limits": examine_limits(),
        "forbidden_calls": _core.forbidden_calls(),
        "variables": {
            name: "(hidden)" if name == _settings.SECRET else os.environ[name]
            for name in sorted(os.environ)
            if name.startswith(_VARIABLES)
        },
        "choice": (choice := _choice(known)),
        "launch_problem": _launch_problem(choice["backend"]),
        "jax": jax_variables.describe(),
        "transport": transports.describe(choice["host"]) if choice["host"] else "",
        "algorithm": transports.describe_algorithm(),
    }


def rows(found: Mapping[str, Any]) -> list[Row]:
    """What `examine` returned, as lines for people. Pure."""
    launcher, python, processors = found["launcher"], found["python"], found["processors"]
    by = f"{launcher['name']}: rank {launcher['rank']} of {launcher['size']} ({launcher['variable']})"
    choice = found["choice"]
    named = [choice["backend"], choice["reason"]] if choice["backend"] else [choice["reason"]]
    return [
        ("samestep", f"{found['samestep']}, Python {python['version']} ({python['executable']})", None),
        ("libraries", ", ".join(f"{name} {number}" for name, number in found["libraries"].items()), None),
        (
            "processors",
            f"{processors['usable']} usable of {processors['all']}; reductions use {processors['isa']}",
            None,
        ),
        ("launcher", by if launcher["name"] else "none: this process is alone", None),
        *(
            (("launch", wrong, False),)
            if (wrong := _wrong_launcher(found) or found["launch_problem"])
            else ()
        ),
        ("MPI", found["mpi"]["detail"], found["mpi"]["usable"]),
        ("mpirun", found["mpirun"]["detail"], bool(found["mpirun"]["path"])),
        *(
            (kind.upper(), had["detail"], bool(had["count"]) or None)
            for kind, had in found["devices"].items()
        ),
        *(
            (f"{kind.upper()} runtime", had["detail"], bool(had["path"]))
            for kind, had in found.get("runtimes", {}).items()
            if found["devices"][kind]["count"]
        ),
        *(
            (f"{kind.upper()} in MPI", text, None)
            for kind, text in found.get("gpu_aware", {}).items()
            if found["devices"][kind]["count"]
        ),
        ("network", found["network"]["detail"], bool(found["network"]["address"])),
        ("NCCL", found["nccl"]["detail"], found["nccl"]["usable"] or None),
        *limit_rows(found["limits"]),
        *(("one host", text, None) for text in found["forbidden_calls"]),
        ("variables", ", ".join(f"{n}={v}" for n, v in found["variables"].items()) or "none set", None),
        *(
            ("variables", unknown_settings.warning(*pair), False)
            for pair in unknown_settings.unknown(found["variables"]).items()
        ),
        ("choice", ": ".join(named), bool(choice["backend"])),
        *((("transport", found["transport"], None),) if found["transport"] else ()),
        ("algorithm", found["algorithm"], None),
        ("JAX on CPU", found["jax"], None),
    ]


def _wrong_launcher(found: Mapping[str, Any]) -> str:
    """Why the ranks would not meet, where the launcher of one MPI was used with the library of another."""
    launcher, family = found["launcher"]["name"], found["mpi"]["family"]
    if launcher not in ("openmpi", "hydra") or family not in ("openmpi", "hydra") or launcher == family:
        return ""
    right = found["mpirun"]["path"] or "the mpirun of that library"
    return (
        f"the launcher of another MPI ({found['launcher']['variable']}) started this process, so every rank "
        f"would be alone. Cure: start with `samestep run`, or with {right}"
    )


def _launch_problem(backend: str) -> str:
    """What `initialize()` will refuse in the variables of the launcher, though the backend can be used."""
    started_by = launchers.launcher()
    if wrong := launchers.problem():
        return wrong
    if backend == "native" and started_by.size > 1 and started_by.name not in launchers.MPI_LAUNCHERS:
        try:
            url.parse("env://")
        except Error as error:
            return str(error)
    return ""


def render(report: Sequence[Row], *, colour: bool) -> str:
    """The report as lines: a mark where something is good or missing, the name, the text.

    Example:
      >>> print(render([("MPI", "Open MPI v5.0.11", True), ("mpirun", "none", False)], colour=False))
      + MPI         Open MPI v5.0.11
      - mpirun      none
    """
    symbols = {True: ("+", _GREEN), False: ("-", _YELLOW), None: (" ", "")}
    lines = []
    for name, text, good in report:
        mark, shade = symbols[good]
        if colour:
            lines.append(f"{shade}{mark}{_PLAIN} {_BOLD}{name:<11}{_PLAIN} {text}")
        else:
            lines.append(f"{mark} {name:<11} {text}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Of `samestep doctor`."""
    parser = argparse.ArgumentParser(
        prog="samestep doctor", description="Shows what was found here, which backend is chosen, and why."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    text = "bring the ranks of the job together and print where each is; start it as the job is started"
    parser.add_argument("--run", action="store_true", help=text)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs `samestep doctor`; returns the exit code, 0 whatever was found."""
    flags = parser().parse_args(argv)
    if flags.run:
        return _run(as_json=flags.json)
    found = examine()
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    print(json.dumps(found, indent=2) if flags.json else render(rows(found), colour=colour))
    return 0


def _run(*, as_json: bool) -> int:
    """Brings the ranks together as `initialize()` does; rank 0 prints a line for each."""
    from samestep.world import lifecycle

    backend = lifecycle.initialize()
    mine = {
        "rank": backend.rank,
        "host": platform.node(),
        "pid": os.getpid(),
        "local_rank": backend.local_rank,
        "node_rank": backend.node_rank,
        "launcher": launchers.launcher().name,
        "backend": type(backend).__name__,
        "transport": backend.transport,
        "address": _network()["address"],
        "interface": _network()["interface"],
    }
    found = json_exchange.gather(internal.communicator(backend), mine, Map((str, int)), 0, backend.timeout)
    if found is not None:
        print(json.dumps(found, indent=2) if as_json else table(found))
    lifecycle.finalize()
    return 0


def table(ranks: Sequence[Mapping[str, Any]]) -> str:
    """One line for each rank under the names of what is known of it. Pure.

    Example:
      >>> print(table([{"rank": 0, "host": "a"}, {"rank": 1, "host": "node1"}]))
      rank host
      0    a
      1    node1
    """
    lines = [list(ranks[0]), *([str(value) or "-" for value in rank.values()] for rank in ranks)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(" ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _mpirun() -> dict[str, str]:
    try:
        path, family = mpirun.find()
    except mpirun.LaunchError as error:
        return {"path": "", "family": "", "detail": str(error)}
    return {"path": path, "family": family, "detail": path}


def _network() -> dict[str, str]:
    """Where this process would listen as a rank of several hosts, without MPI."""
    from samestep.rendezvous import interfaces

    master = launchers.own_variables().get("MASTER_ADDR") or (launchers.slurm_meeting() or ("", 0))[0]
    try:
        address = interfaces.own_address(master, os.environ, several_hosts=True)
    except Error as error:
        return {"address": "", "interface": "", "detail": str(error)}
    if not address:
        return {"address": "", "interface": "", "detail": "no address that another host could reach"}
    variable, names = interfaces.check_names(os.environ)
    toward = f"towards {master}, the host of rank 0" if master else "to other hosts"
    why = f"{variable}={','.join(names)}" if names else toward
    interface = interfaces.of_address(address)
    detail = f"NativeBackend listens at {address} of {interface or '?'} between hosts ({why})"
    return {"address": address, "interface": interface, "detail": detail}


def _choice(known: Facts) -> dict[str, str]:
    try:
        choice = choose(known)
    except Error as error:
        return {"backend": "", "host": "", "reason": str(error)}
    return choice._asdict()


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


_LITTLE_SHM = 256 << 20  # the default of containers is 64 MiB, less than NCCL and data loaders need
_MIN_DESCRIPTORS = 1024


def examine_limits(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> dict[str, Any]:
    """Facts in bytes and counts; None for what has no limit or cannot be found out."""
    shm = _file_system(root / "dev/shm")
    return {
        "shm": shm,
        "memlock": _limit(resource.RLIMIT_MEMLOCK),
        "nofile": {"soft": _limit(resource.RLIMIT_NOFILE), "hard": _limit(resource.RLIMIT_NOFILE, hard=True)},
        "memory": {"usable": usable_memory(root), "available": available_memory(root)},
        "cpus": cpus.usable_cpus(root),
        "cpu_quota": cpus.cpu_quota(root),
        "hosts": hosts(env),
    }


def limit_rows(found: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> list[Row]:
    """What `examine_limits` returned, as limit_rows of `samestep doctor`. Pure."""
    shm, memory, nofile, quota = found["shm"], found["memory"], found["nofile"], found["cpu_quota"]
    few = nofile["soft"] is not None and nofile["soft"] < _MIN_DESCRIPTORS
    few_text = "; raise it with ulimit -n, for a rank has connections to all others"
    little = shm is not None and shm["total"] < _LITTLE_SHM
    little_text = "; NCCL and data loaders may need more: docker run --shm-size=1g" if little else ""
    shm_text = f"{size(shm['free'])} free of {size(shm['total'])}{little_text}" if shm else "there is none"
    limited = f"{quota:g} CPUs by the control group" if quota else "none"
    return [
        ("memory", f"{size(memory['available'])} available of {size(memory['usable'])} usable", None),
        ("CPU quota", limited, None),
        ("threads", _threads(found["cpus"], env), None),
        ("/dev/shm", shm_text, False if little or shm is None else None),
        ("memlock", f"{size(found['memlock'])}, for pinned memory and RDMA", None),
        (
            "nofile",
            f"{nofile['soft']} of up to {nofile['hard'] or 'any number of'} descriptors{few_text * few}",
            False if few else None,
        ),
        ("hosts", found["hosts"], None),
    ]


def _threads(n_cpus: int, env: Mapping[str, str]) -> str:
    if cpus.THREADS in env:
        return f"{env[cpus.THREADS]} for each rank, by {cpus.THREADS}"
    counts = ", ".join(f"{max(1, n_cpus // n)} with {n}" for n in (2, 4))
    return f"{n_cpus} usable CPUs, split among the ranks of a host under samestep run: {counts}"


def hosts(env: Mapping[str, str] = os.environ) -> str:
    """Where `samestep run` would start ranks without `--hosts`. Reads the files that a batch system names.

    Example:
      >>> hosts({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[1-2]"})
      'gpu[1-2], allotted by Slurm: start with srun, or with samestep run --mpi'
    """
    advice = "start with samestep run --mpi"
    if nodes := env.get("SLURM_JOB_NODELIST"):
        return f"{nodes}, allotted by Slurm: start with srun, or with samestep run --mpi"
    for variable, system in (("PBS_NODEFILE", "PBS"), ("PE_HOSTFILE", "SGE")):
        if variable in env:
            also = f", or with samestep run --hostfile ${variable}" if system == "PBS" else ""
            return f"{_first_words(env[variable])}, allotted by {system} ({variable}): {advice}{also}"
    if names := env.get("LSB_HOSTS"):
        return f"{','.join(dict.fromkeys(names.split()))}, allotted by LSF: {advice}"
    rank = launchers.launcher(env)
    here = f"this one, {os.uname().nodename}"
    return here if rank.name else f"{here}; samestep run --hosts names others"


def _first_words(file: str) -> str:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError as error:
        return f"unknown hosts ({error.strerror}: {file})"
    return ",".join(dict.fromkeys(line.split()[0] for line in lines if line.strip()))


def _limit(which: int, *, hard: bool = False) -> int | None:
    value = resource.getrlimit(which)[hard]
    return None if value == resource.RLIM_INFINITY else value


def _file_system(path: Path) -> dict[str, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return {"free": found.f_bavail * found.f_frsize, "total": found.f_blocks * found.f_frsize}

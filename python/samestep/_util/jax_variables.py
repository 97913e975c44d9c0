"""The environment variables with which JAX uses samestep between processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from samestep.errors import UnavailableError

_IMPLEMENTATION, LIBRARY = "JAX_CPU_COLLECTIVES_IMPLEMENTATION", "MPITRAMPOLINE_LIB"
_PATH, _ON_PATH = "PYTHONPATH", Path(__file__).parents[1] / "jax" / "on_path"
_TESTED = ("0.10.2", "0.12.0", "0.12.0.1")  # versions of jaxlib


def find_library() -> str:
    """The path of the library that jaxlib loads in place of an MPI library; "" where there is none."""
    core = find_spec("samestep._core")
    found = Path(core.origin).parent / "jax" / "libsamestep_jax.so" if core and core.origin else None
    return str(found) if found and found.exists() else ""


def library() -> str:
    """The same.

    Raises:
      UnavailableError: this installation has none.

    Example:
      >>> library().endswith("samestep/jax/libsamestep_jax.so")
      True
    """
    if not (found := find_library()):
        raise UnavailableError("this installation of samestep has no libsamestep_jax.so: reinstall it")
    return found


def environment(given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables to add to `given` for JAX to use samestep between processes, and to find the job of a launcher.

    Nothing where `given` asks for other collectives, or for another library.

    Raises:
      UnavailableError: as `library`.

    Example:
      >>> sorted(environment({}))
      ['JAX_CPU_COLLECTIVES_IMPLEMENTATION', 'MPITRAMPOLINE_LIB', 'PYTHONPATH']
      >>> environment({"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"})
      {}
    """
    if given.get(_IMPLEMENTATION, "mpi") != "mpi" or given.get(LIBRARY, "") not in ("", find_library()):
        return {}
    path = [entry for entry in given.get(_PATH, "").split(os.pathsep) if entry and entry != str(_ON_PATH)]
    return {_IMPLEMENTATION: "mpi", LIBRARY: library(), _PATH: os.pathsep.join([str(_ON_PATH), *path])}


def for_ranks(given: Mapping[str, str] = os.environ, asked: bool | None = None) -> dict[str, str]:
    """The same for the ranks of a launcher, if there is a JAX that is `asked` for; None: one that has been tested."""
    installed = _jaxlib_version()
    wanted = installed in _TESTED if asked is None else asked
    return environment(given) if wanted and installed and find_library() else {}


def describe(given: Mapping[str, str] = os.environ) -> str:
    """The implementation of collectives between the processes of a JAX program on CPU, for `samestep doctor`."""
    installed = _jaxlib_version()
    if not installed:
        return "jaxlib is not installed"
    if not find_library():
        return "gloo: this installation has no libsamestep_jax.so"
    if given.get(_IMPLEMENTATION, "mpi") != "mpi":
        return f"{given[_IMPLEMENTATION]} ({_IMPLEMENTATION})"
    if other := given.get(LIBRARY, ""):
        return "samestep" if other == library() else f"{other} ({LIBRARY})"
    if installed not in _TESTED:
        return f"gloo, as jaxlib {installed} has not been tested with samestep; samestep under `samestep run --jax`"
    return f"samestep under `samestep run`; elsewhere with {_IMPLEMENTATION}=mpi (docs/jax.md)"


def name_library() -> None:
    """Names the library to jaxlib, where a program asks for the CPU collectives "mpi" and names none."""
    from jax._src import config

    asked = getattr(config, "cpu_collectives_implementation", None)
    wanted = asked is not None and asked.value == "mpi" and not os.environ.get(LIBRARY)
    if wanted and (found := find_library()):
        os.environ[LIBRARY] = found


def _jaxlib_version() -> str:
    # Here, because it is a third of the modules that the launcher needs.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jaxlib")
    except PackageNotFoundError:
        return ""

"""Names of backends and reductions, as in torch.distributed."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Literal

from samestep import reduce_ops
from samestep.errors import InvalidArgumentError
from samestep.world.choice import gather

BackendName = Literal["gloo", "mpi", "nccl", "native"]

KINDS = {"gloo": "native", "mpi": "mpi", "nccl": "nccl"}
"""Name here -> name that `samestep.initialize` takes."""


class Backend:
    """The names of the backends. `Backend(name)` checks a name in any case, and returns it in lower case, a `str`.

    `"gloo"` is the name of samestep's own host backend here, and `"native"` is read as `"gloo"`.

    Raises:
      InvalidArgumentError: not a string, or no usable backend; lists those that can be used, and why others cannot.

    Example:
      >>> Backend("GLOO"), Backend("native"), Backend.MPI
      ('gloo', 'gloo', 'mpi')
    """

    UNDEFINED = "undefined"
    GLOO = "gloo"
    MPI = "mpi"
    NCCL = "nccl"

    def __new__(cls, name: str) -> str:  # type: ignore[misc]
        """The name in lower case."""
        lower = name.lower() if isinstance(name, str) else ""
        lower = "gloo" if lower == "native" else lower
        if lower in KINDS:
            return lower
        usable = [repr(known) for known in KINDS if is_backend_available(known)]
        refused = [f"{known!r} ({_why_not(known)})" for known in KINDS if not is_backend_available(known)]
        cannot = f"; not usable: {', '.join(refused)}" if refused else ""
        raise InvalidArgumentError(f"there is no backend {name!r}; usable here: {', '.join(usable)}{cannot}")


def is_available() -> bool:
    """Whether this package can be used at all: yes."""
    return True


def is_gloo_available() -> bool:
    """Whether the host backend can be used: yes."""
    return True


def is_mpi_available() -> bool:
    """Whether an MPI library can be loaded. Does not start MPI."""
    return not _why_not("mpi")


def is_nccl_available() -> bool:
    """Whether this process sees a device and can load NCCL or RCCL."""
    return not _why_not("nccl")


def is_backend_available(backend: str) -> bool:
    """Whether the backend of this name can be used; False for unknown names.

    Example:
      >>> is_backend_available("Gloo"), is_backend_available("tcp")
      (True, False)
    """
    name = str(backend).lower()
    return name in (*KINDS, "native") and not _why_not(name)


def _why_not(name: str) -> str:
    """Why a backend cannot be used; "" if it can."""
    if name == "mpi":
        with contextlib.suppress(Exception):
            from samestep._util import mpi_library

            library = mpi_library.load()
            return "" if library.path else library.problem or "no MPI library"
        return "no MPI library can be loaded"
    if name == "nccl":
        with contextlib.suppress(Exception):
            known = gather(probe_mpi=False)
            works = known.devices > 0 and known.nccl_loadable
            return "" if works else f"{known.nccl_detail}; {known.device_detail}"
        return "no device can be asked for"
    return ""


class ReduceOp:
    """The operators of reductions: members of `samestep.ReduceOp` under torch's names.

    Example:
      >>> import samestep
      >>> ReduceOp.PRODUCT is samestep.PROD
      True
    """

    SUM = reduce_ops.SUM
    PRODUCT = reduce_ops.PROD
    MIN = reduce_ops.MIN
    MAX = reduce_ops.MAX
    AVG = reduce_ops.AVG
    BAND = reduce_ops.BAND
    BOR = reduce_ops.BOR
    BXOR = reduce_ops.BXOR


class _DeprecatedNames:
    """SUM PRODUCT MIN MAX; each use warns."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("SUM", "PRODUCT", "MIN", "MAX"):
            raise AttributeError(f"reduce_op has no {name!r}; use ReduceOp")
        warnings.warn(f"reduce_op.{name} is deprecated; use ReduceOp.{name}", FutureWarning, stacklevel=2)
        return getattr(ReduceOp, name)


reduce_op = _DeprecatedNames()
"""Deprecated name of `ReduceOp`: SUM, PRODUCT, MIN and MAX, with a FutureWarning."""

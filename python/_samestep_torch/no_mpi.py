"""Makes `from mpi4py import MPI` an ImportError if there is no MPI library, as libraries that look for MPI expect.

samestep needs mpi4py, but no MPI library. PyTorch Lightning takes an mpi4py that is installed for one that works, and
catches nothing but ImportError.
"""

import sys
from typing import Any


class MissingMPIError(ImportError, RuntimeError):
    """What mpi4py says, as the RuntimeError that it raises and the ImportError that it is."""


class _Finder:
    """Asks the finders behind it, mpi4py's own among them."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "mpi4py.MPI":
            return None
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec = find(fullname, path, target) if find is not None and finder is not cls else None
                if spec is not None:
                    return spec
        except RuntimeError as error:
            raise MissingMPIError(str(error)) from None
        return None


def install() -> None:
    """Idempotent."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)

"""JAX programs of several processes on CPU over samestep, unchanged.

`python -m samestep.jax` prints the variables to set; `samestep run` sets them. Importing this module lets
`jax.distributed.initialize()` find its arguments under `samestep run` and torchrun. Imported before `jax`, it also
names the library for programs that select "mpi": jaxlib reads the name when it is loaded.
"""

import contextlib
import os

from samestep._util.jax_variables import LIBRARY, environment, find_library, library

if not os.environ.get(LIBRARY) and (_found := find_library()):
    os.environ[LIBRARY] = _found

with contextlib.suppress(ImportError, AttributeError):  # no JAX, or one without this interface
    from samestep.jax import cluster as _cluster  # noqa: F401

__all__ = ["environment", "library"]

"""JAX programs of several processes on CPU over samestep, unchanged.

`python -m samestep.jax` prints the variables to set; `samestep run` sets them. Importing this module lets
`jax.distributed.initialize()` find its arguments under `samestep run` and torchrun.
"""

import contextlib

from samestep._util.jax_variables import environment, library

with contextlib.suppress(ImportError, AttributeError):  # no JAX, or one without this interface
    from samestep.jax import cluster as _cluster  # noqa: F401

__all__ = ["environment", "library"]

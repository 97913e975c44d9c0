"""Called by JAX before it creates its devices, through the entry point in the group `jax_plugins`.

A program that asks for the CPU collectives "mpi" and names no library gets samestep's. Nothing else happens: XLA asks
for the ranks when it makes its first devices.
"""

import os


def initialize() -> None:
    """Names the library of samestep to jaxlib, where "mpi" is asked for and no library is named."""
    from jax._src import config

    asked = getattr(config, "cpu_collectives_implementation", None)
    if asked is None or asked.value != "mpi":
        return
    from samestep._util import jax_variables

    if not os.environ.get(jax_variables.LIBRARY) and (found := jax_variables.find_library()):
        os.environ[jax_variables.LIBRARY] = found

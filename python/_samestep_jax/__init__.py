"""Called by JAX before it creates its devices, through the entry point in the group `jax_plugins`.

A program that asks for the CPU collectives "mpi" and names no library gets samestep's; XLA asks for the ranks when it
makes its first devices. A rank with a GPU shows JAX that one alone.
"""

import os
import sys

has_devices = False
"""JAX creates its devices, or has: what it shall see of them is settled."""


def initialize() -> None:
    """Shows JAX the GPU of this rank, and jaxlib the library of samestep."""
    global has_devices  # noqa: PLW0603
    has_devices = True
    if "samestep.gpu.jax_devices" in sys.modules or "LOCAL_RANK" in os.environ:
        from samestep.gpu import jax_devices

        jax_devices.show_own()
    _name_library()


def _name_library() -> None:
    """Names the library of samestep to jaxlib, where "mpi" is asked for and no library is named."""
    from jax._src import config

    asked = getattr(config, "cpu_collectives_implementation", None)
    if asked is None or asked.value != "mpi":
        return
    from samestep._util import jax_variables

    if not os.environ.get(jax_variables.LIBRARY) and (found := jax_variables.find_library()):
        os.environ[jax_variables.LIBRARY] = found

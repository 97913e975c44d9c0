"""The program of test_jax_collectives.py: a world of one process that selects "mpi" after its imports."""

import sys

import samestep.jax  # isort: skip
import jax

jax.config.update("jax_cpu_collectives_implementation", "mpi")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 1, 0)
print(len(jax.devices()), samestep.jax.library())

"""Imported by `import jax` under `samestep run`, which puts this folder on the path of its ranks.

`jax_plugins` is a namespace package, which JAX imports with itself. This part of it lets `jax.distributed.initialize()`
find the job, and leaves the other parts where they are.
"""

import contextlib
from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

with contextlib.suppress(Exception):  # `import jax` must not fail because of this
    from samestep.jax import cluster  # noqa: F401

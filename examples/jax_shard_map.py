"""Data-parallel training with `jit` and `shard_map` over several processes on CPU.

    pip install samestep jax
    samestep run -n 2 examples/jax_shard_map.py

Nothing in the program is samestep's: the launcher lets `jax.distributed.initialize()` find the job. The gradients are
averaged by `psum` inside the compiled step, which XLA hands to samestep. The end of the script checks that the
processes hold the same parameters, and that they are those of one process with all data.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

STEPS = 200
ROWS = 240  # of data, over all devices

rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, 8)).astype(np.float32)
Y = X @ rng.normal(size=8).astype(np.float32)


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def main():
    jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    by_rows = NamedSharding(mesh, P("data"))
    x, y = (jax.make_array_from_callback(a.shape, by_rows, lambda index, a=a: a[index]) for a in (X, Y))

    def shard_step(w, x, y):
        return w - 0.1 * jax.lax.pmean(jax.grad(loss)(w, x, y), "data")

    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P(), "check_vma": False}
    step = jax.jit(jax.shard_map(shard_step, mesh=mesh, **specs))
    w = np.zeros(8, np.float32)
    for _ in range(STEPS):
        w = step(w, x, y)
    w = np.asarray(w.addressable_data(0))

    everywhere = multihost_utils.process_allgather(w)
    assert (everywhere == w).all(), "the processes differ"
    alone = np.zeros(8, np.float32)
    for _ in range(STEPS):
        alone = alone - 0.1 * np.asarray(jax.grad(loss)(alone, X, Y))
    np.testing.assert_allclose(w, alone, rtol=1e-4, atol=1e-5)
    if jax.process_index() == 0:
        print(
            f"loss {loss(w, X, Y):.2e} after {STEPS} steps on {jax.device_count()} devices: the same as on one"
        )


if __name__ == "__main__":
    main()

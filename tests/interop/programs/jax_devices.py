"""Programs of processes with two JAX devices each, for test_jax_programs.py and test_array_view_frameworks.py."""

import atexit
import json
import os
import pathlib
import sys
import time

os.environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import numpy as np
import samestep as ss
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def assert_refused(word, act, *arguments):
    try:
        act(*arguments)
    except (ss.InvalidArgumentError, TypeError) as error:
        assert word in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError(f"{word}: not refused")


def view_arrays():
    from samestep import _core

    mesh = Mesh(jax.devices(), "i")
    whole, parts = (jax.device_put(jnp.ones(4), NamedSharding(mesh, spec)) for spec in (P(), P("i")))
    assert _core.view_info(whole)[1] == (4,)
    assert_refused("device", _core.view_info, parts)
    shard = parts.addressable_shards[1].data
    assert _core.view_info(shard)[1] == shard.shape


def reduce_arrays():
    backend = ss.initialize()
    mesh = Mesh(jax.devices(), "d")
    whole, parts = (
        jax.device_put(jnp.arange(4.0) + backend.rank, NamedSharding(mesh, spec)) for spec in (P(), P("d"))
    )
    total = np.arange(4.0) * 2 + 1

    def reduce(x):
        return backend.allreduce_tree({"x": x})["x"]

    def checked(f, *arguments):
        result = f(*arguments)
        np.testing.assert_array_equal(result, total)
        return result

    # The same on all devices: the result is laid out as the argument.
    assert checked(backend.allreduce, whole).sharding == whole.sharding
    assert checked(reduce, whole).sharding == whole.sharding
    synchronized = ss.synchronize(backend, {"x": whole})["x"]
    assert synchronized.sharding == whole.sharding
    np.testing.assert_array_equal(synchronized, np.arange(4.0))

    on_second = jax.device_put(jnp.arange(4.0) + backend.rank, jax.devices()[1])
    assert checked(backend.allreduce, on_second).sharding == on_second.sharding
    with jax.default_device(jax.devices()[1]):
        anywhere = jnp.arange(4.0) + backend.rank
    for reduced in (checked(backend.allreduce, anywhere), checked(reduce, anywhere)):
        assert reduced.devices() == {jax.devices()[1]} and not reduced.committed
        np.testing.assert_array_equal(
            reduced + parts * 0, total
        )  # an uncommitted one goes where its partners are
    rows = jax.device_put(jnp.ones((2, 3)), NamedSharding(mesh, P(None, None)))
    assert backend.reduce_scatter(rows).sharding.is_equivalent_to(NamedSharding(mesh, P()), 1)

    checked(jax.jit(reduce), whole)
    checked(jax.jit(reduce), parts)  # the compiler gathers them
    assert_refused("device_put", backend.allreduce, parts)
    assert_refused("leaf ['x']", reduce, parts)
    assert_refused("leaf at the top", backend.allreduce_tree, parts)
    assert_refused("each of 2 devices", jax.pmap(reduce), jnp.ones((2, 4)))
    sharded = jax.shard_map(reduce, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    assert_refused("each of 2 devices", jax.jit(sharded), parts)
    checked(lambda x: jax.pmap(reduce)(x)[0], whole[None])


def fail_after_rank_0(failed):
    """Rank 1 exits only after rank 0, which waits for it in a program, has created the file `failed`."""
    backend = ss.initialize(timeout=60)
    failed = pathlib.Path(failed)
    step = jax.jit(lambda x: ss.allreduce_gradients(backend, x))
    jax.block_until_ready(step(jnp.ones(2)))
    if backend.rank == 1:
        backend._abandon("on purpose")
        end = time.monotonic() + 60
        while not failed.exists() and time.monotonic() < end:
            time.sleep(0.01)
        raise KeyError("the cause")
    atexit.register(failed.touch)
    jax.block_until_ready(step(jnp.ones(2)))


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

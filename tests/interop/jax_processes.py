"""Programs of several JAX processes: `python jax_processes.py NAME`, started by `samestep.jax.check.run_processes`."""

import contextlib
import os
import signal
import sys

import numpy as np
from samestep.jax.check import initialize


def summed(devices, width=100):
    """The sum over a mesh of `devices` in this order, checked; nothing on a process that has none of them."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    if all(device.process_index != jax.process_index() for device in devices):
        return
    n = len(devices)
    mesh, split = Mesh(np.array(devices), ("i",)), PartitionSpec("i")
    x = np.arange(n * width, dtype=np.float32).reshape(n, width)
    whole = jax.make_array_from_callback(x.shape, NamedSharding(mesh, split), lambda index: x[index])
    program = jax.shard_map(
        lambda s: jax.lax.psum(s, "i"), mesh=mesh, in_specs=split, out_specs=PartitionSpec()
    )
    found = np.asarray(jax.jit(program)(whole).addressable_data(0))
    np.testing.assert_array_equal(found, x.sum(0, keepdims=True))


def orders_and_parts():
    """Meshes of all devices in several orders work. One of two devices is refused, on all processes."""
    import jax

    devices, texts = jax.devices(), []
    for turn in range(3):
        summed(devices[turn:] + devices[:turn])
    summed(jax.local_devices()[:1])  # nothing to communicate
    for mesh in (devices[:2], devices[::-1], devices):
        try:
            summed(mesh)
        except jax.errors.JaxRuntimeError as error:
            texts.append(str(error))
    has_part = any(device.process_index == jax.process_index() for device in devices[:2])
    assert len(texts) == 2 + has_part, texts
    for text in texts:
        assert f"communicates between 2 of the {len(devices)} devices of the job" in text
        assert "JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo" in text


def many_times():
    """`psum_scatter` over all devices, many programs dispatched before the first result is compared."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    n, split = jax.device_count(), PartitionSpec("i")
    mesh = jax.make_mesh((n,), ("i",))
    x = np.random.default_rng(0).integers(-9, 9, (n, n * 7)).astype(np.float32)
    whole = jax.make_array_from_callback(x.shape, NamedSharding(mesh, split), lambda index: x[index])

    def scattered(shard):
        return jax.lax.psum_scatter(shard, "i", scatter_dimension=1, tiled=True)

    program = jax.jit(jax.shard_map(scattered, mesh=mesh, in_specs=split, out_specs=split))
    expected = x.sum(0).reshape(n, 7)
    results = [program(whole) for _ in range(int(os.environ["JAX_TEST_TIMES"]))]
    shards = [shard for result in results for shard in result.addressable_shards]
    wrong = sum(not np.array_equal(shard.data, expected[shard.index]) for shard in shards)
    print(f"wrong: {wrong}")


def float16_by_jit():
    """Reductions that the partitioner inserts: in float32, rounded once."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    n = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), ("i",))
    rows, everywhere = (NamedSharding(mesh, spec) for spec in (PartitionSpec("i"), PartitionSpec()))
    x = np.ones((n, 3), np.float16)
    x[0] = 2048  # 2048 + 1 is 2048 in float16
    whole = jax.make_array_from_callback(x.shape, rows, lambda index: x[index])
    exact = x.astype(np.float64)
    programs = {
        "product": (lambda a: a.T @ (a / a), exact.T @ np.ones((n, 3))),
        "sum": (lambda a: jax.lax.reduce_sum_p.bind(a, axes=(0,), out_sharding=None), exact.sum(0)),
        "jnp.sum": (lambda a: a.sum(0), exact.sum(0)),
        "max": (lambda a: a.max(0), x.max(0)),
        "min": (lambda a: jnp.min(a, 0), x.min(0)),
    }
    for name, (program, expected) in programs.items():
        found = jax.jit(program, out_shardings=everywhere)(whole)
        assert found.dtype == np.float16, name
        np.testing.assert_array_equal(found, expected.astype(np.float16), err_msg=name)


def ending(how):
    """The last process ends, or does something else, while the others wait for it in `psum`."""
    import jax
    from jax._src import distributed

    def wait_for_all():
        with contextlib.suppress(Exception):  # of the process whose store of keys is gone
            distributed.global_state.client.wait_at_barrier("end", 300_000)

    summed(jax.devices())
    last = jax.process_index() == jax.process_count() - 1
    if last and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if last and how == "absent":
        wait_for_all()
        os._exit(7)
    try:
        summed(jax.devices(), 50 if last else 100)
    except Exception as error:
        print(error, flush=True)
        if how == "absent":
            wait_for_all()
        os._exit(7)  # JAX would wait at its end for the process that was killed


def found_by_cluster():
    """`jax.distributed.initialize()` without arguments."""
    import jax

    jax.distributed.initialize()
    summed(jax.devices())
    print(f"process {jax.process_index()} of {jax.process_count()}: {os.environ['MPITRAMPOLINE_LIB']}")


def flax_training():
    """A training loop of Flax NNX, with the data sharded over the devices by `jit`."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 5)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True))

    def trained(inputs, targets):
        model = nnx.Sequential(
            nnx.Linear(5, 16, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(16, 1, rngs=nnx.Rngs(1))
        )
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, inputs, targets):
            loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(inputs) - targets) ** 2))(model)
            optimizer.update(model, gradients)
            return loss

        losses = [float(step(model, optimizer, inputs, targets)) for _ in range(10)]
        leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
        return losses, [np.asarray(leaf.addressable_data(0)) for leaf in leaves]

    rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    sharded = [jax.make_array_from_callback(a.shape, rows, lambda index, a=a: a[index]) for a in (x, y)]
    losses, weights = trained(*sharded)
    alone, alone_weights = trained(x, y)
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    for got, expected in zip(weights, alone_weights, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)
        assert (multihost_utils.process_allgather(got) == got).all()
    assert losses[-1] < losses[0]


def orbax_checkpoint(folder):
    """Arrays that are sharded over processes, saved and read again by Orbax."""
    import jax
    import orbax.checkpoint as ocp
    from jax.sharding import NamedSharding, PartitionSpec

    rows = NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), PartitionSpec("data"))
    x = np.arange(jax.device_count() * 6, dtype=np.float32).reshape(-1, 3)
    whole = jax.make_array_from_callback(x.shape, rows, lambda index: x[index])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/saved", {"x": whole})
        checkpointer.wait_until_finished()
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
        again = checkpointer.restore(f"{folder}/saved", {"x": shape})["x"]
    for shard in again.addressable_shards:
        np.testing.assert_array_equal(shard.data, x[shard.index])


def orbax_own_tests(folder):
    """Those of the tests that the package of Orbax contains which save arrays and restore them."""
    import unittest

    from absl import flags
    from orbax.checkpoint import Checkpointer
    from orbax.checkpoint._src.checkpointers import checkpointer_test_utils

    class CheckpointerTest(checkpointer_test_utils.CheckpointerTestBase.Test):
        def checkpointer(self, handler, **options):
            return Checkpointer(handler, **options)

    flags.FLAGS([sys.argv[0], f"--test_tmpdir={folder}"])
    loader = unittest.TestLoader()
    loader.testNamePatterns = ["*.test_save_restore*"]
    result = unittest.TextTestRunner().run(loader.loadTestsFromTestCase(CheckpointerTest))
    assert result.wasSuccessful()
    assert result.testsRun > len(result.skipped), "no test ran"


def equinox_training():
    """A training loop of Equinox, with the data sharded over the devices by `eqx.filter_jit`."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 5)).astype(np.float32)
    y = np.sin(x.sum(1))

    def trained(inputs, targets):
        model = eqx.nn.MLP(5, "scalar", 16, 2, key=jax.random.key(0))
        optimizer = optax.adam(1e-2)
        state = optimizer.init(eqx.filter(model, eqx.is_array))

        @eqx.filter_jit
        def step(model, state, inputs, targets):
            loss, gradients = eqx.filter_value_and_grad(
                lambda m: jnp.mean((jax.vmap(m)(inputs) - targets) ** 2)
            )(model)
            updates, state = optimizer.update(gradients, state)
            return eqx.apply_updates(model, updates), state, loss

        losses = []
        for _ in range(10):
            model, state, loss = step(model, state, inputs, targets)
            losses.append(float(loss))
        leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
        return losses, [np.asarray(leaf.addressable_data(0)) for leaf in leaves]

    rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    sharded = [jax.make_array_from_callback(a.shape, rows, lambda index, a=a: a[index]) for a in (x, y)]
    losses, weights = trained(*sharded)
    alone, alone_weights = trained(x, y)
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    for got, expected in zip(weights, alone_weights, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)
        assert (multihost_utils.process_allgather(got) == got).all()
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    if sys.argv[1] == "found_by_cluster":
        found_by_cluster()
    else:
        initialize()
        globals()[sys.argv[1]](*sys.argv[2:])

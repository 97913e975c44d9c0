"""Gradients of JAX in an Accumulator."""

import numpy as np
import pytest
import samestep as ss

jax = pytest.importorskip("jax")
jnp = jax.numpy

pytestmark = pytest.mark.ranks(1, 2, 3, timeout=120, backends=["native"])


def gradients(shard):
    return np.random.default_rng(shard).standard_normal((2, 100)).astype("f4")


def test_the_mean_is_that_of_numpy_arrays(group):
    of_jax, of_numpy = ss.Accumulator(group, 8), ss.Accumulator(group, 8)
    for _ in range(2):
        for shard in of_jax.indices:
            first, second = gradients(shard)
            of_jax.add([jnp.asarray(first), {"b": jnp.asarray(second, jnp.bfloat16)}, shard], shard=shard)
            of_numpy.add([first, {"b": jnp.asarray(second, jnp.bfloat16)}, shard], shard=shard)
        found, expected = of_jax.mean(), of_numpy.mean()
        assert isinstance(found[0], jax.Array)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1]["b"], expected[1]["b"])
        assert found[2] == expected[2] == 3


def test_arrays_that_alias_memory_of_the_caller_are_copied(group):
    total = ss.Accumulator(group, 8)
    room = np.empty(4064, "u1")
    start = -room.ctypes.data % 64  # JAX copies what is not aligned
    memory = room[start : start + 4000].view("f4")
    for shard in total.indices:
        memory[:] = shard
        alias = jax.dlpack.from_dlpack(memory)
        assert alias.unsafe_buffer_pointer() == memory.ctypes.data
        total.add([alias], shard=shard)
    np.testing.assert_array_equal(total.mean()[0], 3.5)


@pytest.mark.parametrize("shards", [True, False], ids=["shards", "any number"])
@pytest.mark.parametrize("when", ["before its sibling", "before the mean"])
def test_a_kept_array_that_was_donated_is_an_error_on_all_ranks(group, shards, when):
    total = ss.Accumulator(group, 2 * group.size if shards else None)
    first, second = total.indices[:2]
    last = group.size - 1

    def add(shard, grads):
        total.add([grads], shard=shard if shards else None, copy=False)

    grads = [jnp.asarray(gradients(i)[0]) for i in range(2)]
    add(first, grads[0])
    is_before = when == "before its sibling"
    if group.rank == last and is_before:
        jax.jit(lambda x: x + 1, donate_argnums=0)(grads[0])
        with pytest.raises(ss.InvalidArgumentError, match="has been deleted"):
            add(second, grads[1])
    elif is_before:
        add(second, grads[1])
    elif group.rank == last:
        jax.jit(lambda x: x + 1, donate_argnums=0)(grads[0])
    with pytest.raises(ss.InvalidArgumentError, match=f"could not be added; rank {last}: .*deleted"):
        total.mean()
    for shard in (first, second):
        add(shard, jnp.ones(100))
    np.testing.assert_array_equal(total.mean()[0], 1)

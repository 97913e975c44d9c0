"""Gradients of JAX in an Accumulator, which keeps the arrays: nobody can change them."""

import weakref

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


def test_arrays_are_kept_until_the_mean_and_not_copied(group):
    total = ss.Accumulator(group, 8)
    seen = []
    for shard in total.indices:
        grads = jnp.asarray(gradients(shard))
        seen.append(weakref.ref(grads))
        total.add([grads], shard=shard)
        del grads
        if len(seen) == 1:
            assert seen[0]() is not None
    total.mean()
    assert not any(ref() is not None for ref in seen)


def test_an_array_that_was_donated_is_an_error_and_no_shard_is_missing_silently(group):
    total = ss.Accumulator(group, 2 * group.size)
    first, second = total.indices
    grads = jnp.asarray(gradients(first))
    total.add([grads], shard=first)
    jax.jit(lambda x: x + 1, donate_argnums=0)(grads)
    with pytest.raises(ss.InvalidArgumentError, match="has been deleted"):
        total.add([jnp.asarray(gradients(second))], shard=second)
    total.add([jnp.asarray(gradients(second))], shard=second)
    with pytest.raises(ss.InvalidArgumentError, match="not added: shard 0 of rank 0"):
        total.mean()
    for shard in total.indices:
        total.add([jnp.asarray(gradients(shard))], shard=shard)
    assert np.isfinite(total.mean()[0]).all()

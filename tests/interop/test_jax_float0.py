"""Gradients of whole numbers, which JAX gives as arrays of float0: they hold nothing, and pass as they are."""

import numpy as np
import pytest
import samestep as ss

jax = pytest.importorskip("jax")
jnp = jax.numpy

pytestmark = pytest.mark.ranks(1, 3, timeout=120, backends=["native"])

N = 200  # more than one run of 64 elements, so that all ranks of a sharded optimizer have a part


def params():
    return {"count": jnp.arange(3), "w": jnp.arange(float(N))}


def gradients(params, rank):
    return jax.grad(lambda p: jnp.sum(p["w"] ** 2 * (rank + 1.0)), allow_int=True)(params)


def mean_of(group):
    return np.arange(float(N)) * (group.size + 1)


def accumulated(group, grads):
    total = ss.Accumulator(group, group.size)
    total.add(grads, shard=group.rank)
    return total.mean()


AVERAGES = {
    "gradients": ss.allreduce_gradients,
    "tree": lambda group, grads: group.allreduce_tree(grads, "avg"),
    "weight": lambda group, grads: ss.allreduce_gradients(group, grads, weight=2),
    "accumulator": accumulated,
}


@pytest.mark.parametrize("name", AVERAGES)
def test_they_pass_and_the_others_are_averaged(group, name):
    found = AVERAGES[name](group, gradients(params(), group.rank))
    np.testing.assert_array_equal(found["w"], mean_of(group))
    assert (found["count"].dtype, found["count"].shape) == (jax.dtypes.float0, (3,))


def test_they_pass_in_compiled_functions(group):
    program = jax.jit(lambda p: ss.allreduce_gradients(group, gradients(p, group.rank)))
    found = program(params())
    np.testing.assert_array_equal(found["w"], mean_of(group))
    assert (found["count"].dtype, found["count"].shape) == (jax.dtypes.float0, (3,))


def test_the_calls_that_only_read_trees(group):
    grads = gradients(params(), 0)
    assert group.all_finite(grads)
    assert group.same(grads)
    assert ss.synchronize(group, grads)["count"].dtype == jax.dtypes.float0


def test_other_shapes_are_a_mismatch(group):
    if group.size == 1:
        return
    leaf = np.zeros(3 if group.rank else 2, jax.dtypes.float0)
    with pytest.raises(ss.MismatchError, match=r"leaf \['n'\] is float0 \(2,\) on rank 0"):
        group.allreduce_tree({"n": leaf, "w": np.ones(2)})


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("wrap", [ss.DistributedOptimizer, ss.ShardedOptimizer])
def test_optimizers_get_them_in_the_shape_of_their_parameters(group, wrap, compiled):
    optax = pytest.importorskip("optax")

    def zeros_for_whole_numbers(updates, like):
        assert updates["count"].shape == like["count"].shape
        return {"count": jnp.zeros_like(like["count"]), "w": updates["w"]}

    def update(params, state):
        return opt.update(gradients(params, group.rank), state, params)

    opt = wrap(group, optax.chain(optax.stateless(zeros_for_whole_numbers), optax.sgd(1.0)))
    updates, _ = (jax.jit(update) if compiled else update)(params(), opt.init(params()))
    np.testing.assert_array_equal(updates["w"], -mean_of(group))
    np.testing.assert_array_equal(updates["count"], np.zeros(3))


def test_updates_that_hold_nothing_have_the_shape_of_their_parameters(group):
    optax = pytest.importorskip("optax")
    opt = ss.ShardedOptimizer(group, optax.masked(optax.sgd(1.0), {"count": False, "w": True}))
    updates, _ = opt.update(gradients(params(), group.rank), opt.init(params()), params())
    np.testing.assert_array_equal(updates["w"], -mean_of(group))
    assert (updates["count"].dtype, updates["count"].shape) == (jax.dtypes.float0, (3,))

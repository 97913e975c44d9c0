"""optax: a wrapped transformation on parts of a batch equals the plain one on the whole, eager and compiled."""

import numpy as np
import pytest
import samestep as ss

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

BACKENDS = ["self", "native"]  # the same law on all: what differs between them is for tests/conformance
pytestmark = pytest.mark.ranks(1, 3, timeout=180, backends=BACKENDS)

N_SAMPLES = 12  # a multiple of all numbers of ranks, so that the mean of means is the mean


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - y) ** 2)


def initial():
    return {"w": jnp.linspace(-1, 1, 6, dtype="float32").reshape(3, 2), "b": jnp.zeros(2)}


def batch(rank=0, size=1):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(N_SAMPLES, 3)).astype("f4"), rng.normal(size=(N_SAMPLES, 2)).astype("f4")
    mine = slice(rank * N_SAMPLES // size, (rank + 1) * N_SAMPLES // size)
    return x[mine], y[mine]


def train(opt, x, y, *, compiled, steps=4):
    def step(params, state):
        grads = jax.grad(loss)(params, x, y)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if compiled else step
    params = initial()
    state = opt.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def assert_close(a, b, tolerance=1e-5):
    for leaf, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=tolerance)


def assert_equal_everywhere(group, tree):
    mine = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    assert all(other == mine for other in group.allgather_object(mine))


OPTIMIZERS = {
    "adam": lambda: optax.adam(0.05),
    "clipped chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
    "schedule": lambda: optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(0.1, 10)),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_equals_one_process_on_the_whole_batch(group, name, compiled):
    make = OPTIMIZERS[name]
    want, want_state = train(make(), *batch(), compiled=compiled)
    got, state = train(
        ss.DistributedOptimizer(group, make()), *batch(group.rank, group.size), compiled=compiled
    )
    assert_close(got, want)
    assert_equal_everywhere(group, got)
    assert jax.tree.structure(state) == jax.tree.structure(want_state)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_accumulation_around_it_sends_every_other_step(group, compiled):
    want, _ = train(optax.MultiSteps(optax.adam(0.05), 2), *batch(), compiled=compiled)
    wrapped = optax.MultiSteps(ss.DistributedOptimizer(group, optax.adam(0.05)), 2)
    got, _ = train(wrapped, *batch(group.rank, group.size), compiled=compiled)
    assert_close(got, want)


def test_it_is_still_a_gradient_transformation(group):
    plain = optax.adam(0.1)
    wrapped = ss.DistributedOptimizer(group, plain)
    assert type(wrapped) is type(plain)
    params = initial()
    optax.chain(optax.clip(1.0), wrapped).init(params)
    for a, b in zip(jax.tree.leaves(wrapped.init(params)), jax.tree.leaves(plain.init(params)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_learning_rate_in_the_state_can_be_changed(group):
    opt = ss.DistributedOptimizer(group, optax.inject_hyperparams(optax.sgd)(0.1))
    params = initial()
    state = opt.init(params)
    state.hyperparams["learning_rate"] = jnp.asarray(0.5)
    updates, _ = opt.update(jax.tree.map(jnp.ones_like, params), state, params)
    np.testing.assert_allclose(updates["b"], -0.5)


def test_sums_on_request(group):
    opt = ss.DistributedOptimizer(group, optax.sgd(1.0), op=ss.SUM)
    params = initial()
    updates, _ = opt.update(jax.tree.map(jnp.ones_like, params), opt.init(params), params)
    np.testing.assert_allclose(updates["b"], -float(group.size))


def test_states_are_synchronized(group):
    params = jax.tree.map(lambda x: x + group.rank, initial())
    opt = optax.adam(0.1)
    _, state = opt.update(params, opt.init(params), params)
    want = jax.tree.map(np.asarray, group.bcast_object(jax.tree.map(np.asarray, state)))
    got = ss.synchronize(group, state)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(got))
    assert_close(got, want, 0)
    key = ss.synchronize(group, jax.random.key(group.rank))
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(0)))


@pytest.mark.parametrize("compiled", [False, True])
def test_random_keys_are_not_added_up(group, compiled):
    tree = {"k": jax.random.key(5), "x": jnp.ones(2)}
    for reduce in (
        lambda t: group.allreduce_tree(t, "sum"),
        lambda t: ss.allreduce_gradients(group, t),
        lambda t: ss.allreduce_gradients(group, t, weight=1.0) if not compiled else group.allreduce_tree(t),
    ):
        with pytest.raises(
            ss.InvalidArgumentError, match=r"leaf \['k'\].*: a random key, whose bits have no sum"
        ):
            (jax.jit(reduce) if compiled else reduce)(tree)
    with pytest.raises(ss.InvalidArgumentError, match="a random key"):
        ss.Accumulator(group).add(tree)
    if compiled:
        with pytest.raises(ss.InvalidArgumentError, match="allreduce: a random key"):
            jax.jit(group.allreduce)(tree["k"])
    key = group.bcast if compiled else lambda k: ss.synchronize(group, k)
    got = (jax.jit(key) if compiled else key)(jax.random.key(group.rank))
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(jax.random.key(0)))


def test_arrays_stay_arrays_of_jax_and_shared_ones_shared(group):
    array = jnp.full(3, group.rank + 1.0)
    got = ss.synchronize(group, [array, array], root=group.size - 1)
    assert isinstance(got[0], jax.Array)
    assert got[0] is got[1]
    np.testing.assert_array_equal(got[0], np.full(3, float(group.size)))
    np.testing.assert_array_equal(array, np.full(3, group.rank + 1.0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "float32"])
def test_other_dtypes(group, dtype):
    tree = {"a": jnp.full(3, group.rank + 1, dtype), "b": jnp.full((2, 2), group.rank, dtype)}
    got = group.allreduce_tree(tree, "sum")
    assert got["a"].dtype == dtype
    np.testing.assert_array_equal(got["a"].astype("float32"), sum(range(group.size + 1)))
    np.testing.assert_array_equal(got["b"].astype("float32"), sum(range(group.size)))


def test_a_missing_gradient_is_zeros_of_jax(group):
    tree = [None if group.rank else jnp.full(3, float(group.size)), jnp.ones(2)]
    got = ss.allreduce_gradients(group, tree)
    assert isinstance(got[0], jax.Array)
    np.testing.assert_allclose(got[0], 1)


def test_several_reductions_in_one_program_keep_their_order(group):
    @jax.jit
    def step(x):
        heavy = ss.allreduce_gradients(group, jnp.sin(jnp.outer(x, x) @ jnp.outer(x, x)), ss.SUM)
        light = ss.allreduce_gradients(group, x, ss.SUM)
        return heavy.sum(), light

    x = jnp.full(200, group.rank + 1.0)
    for _ in range(3):
        _, light = step(x)
        np.testing.assert_allclose(light, sum(range(group.size + 1)))


def test_a_program_under_way_does_not_meet_the_messages_of_the_caller(group):
    step = jax.jit(lambda x: ss.allreduce_gradients(group, {"x": jnp.sin(x @ x)})["x"])
    x = jnp.full((100, 100), 0.01 * (group.rank + 1))
    for i in range(20):
        pending = step(x)  # dispatched, most likely not run yet
        assert group.allreduce(np.array([i])) == i * group.size
        x = x + 0.001 * pending
    assert_equal_everywhere(group, pending)


@pytest.mark.ranks(3, timeout=180, backends=BACKENDS)
def test_a_difference_inside_a_program_is_an_error_of_the_program(group):
    step = jax.jit(lambda x: ss.allreduce_gradients(group, {"x": x}))
    with pytest.raises(ss.MismatchError, match=r"leaf \['x'\] is float32 \(2,\) on rank"):
        jax.block_until_ready(step(jnp.ones(2 + (group.rank == group.size - 1))))
    np.testing.assert_array_equal(group.allreduce(np.ones(1)), group.size)

"""Optimizers of optax whose rates, counts or keys differ between ranks: refused on all of them, eager and compiled."""

import dataclasses
import functools
import re

import numpy as np
import pytest
import samestep as ss

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

pytestmark = pytest.mark.ranks(3, timeout=180, backends=["native"])

OPTIMIZERS = {
    "distributed": ss.DistributedOptimizer,
    "sharded": ss.ShardedOptimizer,
    "sharded sums": lambda group, opt: ss.ShardedOptimizer(group, opt, op=None),
}
PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(1)}


def of_rank(group, value, other):
    return other if group.rank == group.size - 1 else value


def another_rate(group):
    opt = yield optax.inject_hyperparams(optax.sgd)(0.25)
    state = opt.init(PARAMS)
    state.hyperparams["learning_rate"] = jnp.float32(of_rank(group, 0.25, 0.5))
    yield state


def another_count(group):
    opt = yield optax.adam(0.25)
    yield optax.tree_utils.tree_set(opt.init(PARAMS), count=jnp.int32(of_rank(group, 3, 2)))


def another_setting(group):
    opt = yield optax.sgd(of_rank(group, 0.25, 0.5))
    yield opt.init(PARAMS)


def another_schedule(group):
    opt = yield optax.sgd(optax.exponential_decay(0.25, of_rank(group, 10, 20), 0.5))
    yield opt.init(PARAMS)


def another_rule(group):
    opt = yield of_rank(group, optax.sgd, optax.sign_sgd)(0.25)
    yield opt.init(PARAMS)


CASES = {
    another_rule: ".update_fn on ranks 0, 1 and scale_by_sign.<locals>.update_fn on rank 2",
    another_rate: "state.hyperparams['learning_rate'] is 0.25 on ranks 0, 1 and 0.5 on rank 2",
    another_count: "state[0].count is 3 on ranks 0, 1 and 2 on rank 2",
    another_setting: "step_size is -0.25 on ranks 0, 1 and -0.5 on rank 2",
    another_schedule: "transition_steps is 10 on ranks 0, 1 and 20 on rank 2",
}


def prepared(group, case, wrap):
    steps = case(group)
    opt = wrap(group, next(steps))
    return opt, steps.send(opt)


@pytest.mark.parametrize("wrap", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_differs_is_named_on_all_ranks(group, case, wrap):
    opt, state = prepared(group, case, wrap)
    for update in (opt.update, jax.jit(opt.update)):
        with pytest.raises(ss.MismatchError, match=re.escape(CASES[case])):
            jax.block_until_ready(update(PARAMS, state=state, params=PARAMS))


def test_a_state_that_was_synchronized_is_taken_by_the_same_program(group):
    opt, state = prepared(group, another_rate, ss.DistributedOptimizer)
    update = jax.jit(opt.update)
    with pytest.raises(ss.MismatchError, match="learning_rate"):
        jax.block_until_ready(update(PARAMS, state, PARAMS))
    updates, _ = update(PARAMS, ss.synchronize(group, state), PARAMS)
    np.testing.assert_array_equal(updates["b"], [-0.25])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_keys_of_noise_are_compared(group, compiled):
    key = jax.random.key(of_rank(group, 1, 2))
    opt = ss.DistributedOptimizer(group, optax.chain(optax.add_noise(0.1, 0.5, key), optax.sgd(0.25)))
    update = jax.jit(opt.update) if compiled else opt.update
    with pytest.raises(ss.MismatchError, match=r"key.* is \[0, 1\] on ranks 0, 1 and \[0, 2\] on rank 2"):
        jax.block_until_ready(update(PARAMS, opt.init(PARAMS), PARAMS))


def test_a_program_is_differentiated_and_mapped_with_its_state(group):
    opt = ss.DistributedOptimizer(group, optax.inject_hyperparams(optax.sgd)(0.25))
    states = jax.vmap(opt.init)({"w": jnp.ones((2, 3))})

    def moved(x, state):
        updates, _ = opt.update({"w": x}, state)
        return updates["w"].sum()

    one = jax.tree.map(lambda x: x[0], states)
    np.testing.assert_array_equal(jax.jit(jax.grad(moved))(jnp.ones(3), one), np.full(3, -0.25))
    np.testing.assert_array_equal(jax.jit(jax.vmap(moved))(jnp.ones((2, 3)), states), [-0.75, -0.75])


def test_numbers_of_user_functions_may_differ(group):
    def printing(of):
        return optax.stateless(lambda updates, params: updates if of >= 0 else None)

    opt = ss.DistributedOptimizer(group, optax.chain(printing(group.rank), optax.sgd(0.25)))
    updates, _ = opt.update(PARAMS, opt.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates["b"], [-0.25])


class Label:
    """Written by its address, which is another one in each process."""

    def __init__(self, order):
        self.order = order

    def __hash__(self):
        return self.order

    def __eq__(self, other):
        return self.order == other.order

    def __lt__(self, other):
        return self.order < other.order


def test_labels_without_a_name(group):
    inner = {Label(1): optax.sgd(0.25), Label(2): optax.set_to_zero()}
    opt = ss.DistributedOptimizer(group, optax.multi_transform(inner, {"w": Label(2), "b": Label(1)}))
    updates, _ = opt.update(PARAMS, opt.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates["b"], [-0.25])


class Momentum:
    """Of NumPy, with a rate in its state."""

    def init(self, params):
        return {"rate": 0.25, "v": np.zeros_like(params["b"])}

    def update(self, grads, state, params=None):
        v = state["v"] + grads["b"]
        return {"b": -state["rate"] * v}, {**state, "v": v}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["v"], meta_fields=["rate"])
@dataclasses.dataclass
class WithRate:
    v: object
    rate: float


class OfRecords:
    """With a rate that JAX does not see as a leaf."""

    def init(self, params):
        return WithRate(jax.tree.map(jnp.zeros_like, params), 0.25)

    def update(self, grads, state, params=None):
        return jax.tree.map(lambda g: -state.rate * g, grads), state


@pytest.mark.parametrize("wrap", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_static_data_of_the_state_is_compared(group, wrap):
    opt = wrap(group, OfRecords())
    state = opt.init(PARAMS)
    other = dataclasses.replace(state, rate=of_rank(group, 0.25, 0.5))
    for update in (opt.update, jax.jit(opt.update)):
        np.testing.assert_array_equal(update(PARAMS, state, PARAMS)[0]["b"], [-0.25])
        named = r"static data of state is .*0.25.* on ranks 0, 1 and .*0.5.* on rank 2"
        with pytest.raises(ss.MismatchError, match=named):
            jax.block_until_ready(update(PARAMS, other, PARAMS))


@pytest.mark.parametrize("weight", [None, 2.0])
def test_the_state_of_other_pairs_is_compared(group, weight):
    opt, grads = ss.DistributedOptimizer(group, Momentum()), {"b": np.ones(3)}
    state = opt.init(grads)
    np.testing.assert_array_equal(opt.update(grads, state, weight=weight)[0]["b"], np.full(3, -0.25))
    state["rate"] = of_rank(group, 0.25, 0.5)
    with pytest.raises(ss.MismatchError, match=r"state\['rate'\] is 0.25 on ranks 0, 1 and 0.5 on rank 2"):
        opt.update(grads, state, weight=weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int8"])
def test_gradients_that_should_be_equal_already_are_compared(group, dtype):
    opt = ss.ShardedOptimizer(group, optax.sgd(1.0), op=None)
    params = {"w": jnp.ones((30, 11), dtype), "b": jnp.ones(3, dtype)}
    state = opt.init(params)
    for update in (opt.update, jax.jit(opt.update)):
        updates, _ = update(params, state, params)
        np.testing.assert_array_equal(updates["b"].astype("complex64"), np.full(3, -1))
        other = {**params, "b": params["b"].at[2].set(of_rank(group, 1, 2))}
        with pytest.raises(
            ss.MismatchError, match=r"with op=None the gradient \['b'\] is .* on ranks 0, 1 and"
        ):
            jax.block_until_ready(update(other, state, params))

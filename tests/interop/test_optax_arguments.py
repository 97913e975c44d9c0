"""Arguments of update besides gradients, state and parameters: those of one process on the whole batch, or an error."""

import numpy as np
import pytest
import samestep as ss
from samestep.optimizer import averaged

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

pytestmark = pytest.mark.ranks(1, 3, timeout=180, backends=["native"])

N_SAMPLES = 12  # a multiple of all numbers of ranks, so that the mean of means is the mean


def batch(rank=0, size=1):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N_SAMPLES, 3)).astype("f4")
    y = x @ np.array([1.0, -2.0, 0.5], "f4") + np.arange(
        N_SAMPLES, dtype="f4"
    )  # parts with losses of their own
    mine = slice(rank * N_SAMPLES // size, (rank + 1) * N_SAMPLES // size)
    return x[mine], y[mine]


def train(opt, rank=0, size=1, *, names, compiled=False, steps=3):
    x, y = batch(rank, size)

    def loss(w):
        return jnp.mean((x @ w - y) ** 2)

    def step(w, state):
        value, grads = jax.value_and_grad(loss)(w)
        known = {"value": value, "grad": grads, "value_fn": loss}
        updates, state = opt.update(grads, state, w, **{name: known[name] for name in names})
        return optax.apply_updates(w, updates), state

    step = jax.jit(step) if compiled else step
    w = jnp.zeros(3)
    state = opt.init(w)
    for _ in range(steps):
        w, state = step(w, state)
    return w


def plateau():
    return optax.chain(optax.sgd(0.05), optax.contrib.reduce_on_plateau(factor=0.1, patience=1, rtol=0.3))


OPTIMIZERS = {
    "polyak": (lambda: optax.polyak_sgd(max_learning_rate=0.5), ["value"]),
    "momo": (lambda: optax.contrib.momo(0.5), ["value"]),
    "plateau": (plateau, ["value"]),
    "lbfgs": (optax.lbfgs, ["value", "grad", "value_fn"]),
    "backtracking": (
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8)),
        ["value", "grad", "value_fn"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_equals_one_process_on_the_whole_batch(group, name, compiled):
    make, names = OPTIMIZERS[name]
    want = train(make(), names=names, compiled=True)
    opt = ss.DistributedOptimizer(group, make())
    got = train(opt, group.rank, group.size, names=names, compiled=compiled)
    assert group.same({"w": got})
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


AROUND = {
    "chain": lambda opt: optax.chain(optax.clip(10.0), opt),
    "accumulated": lambda opt: optax.MultiSteps(opt, 2),
    "if finite": lambda opt: optax.apply_if_finite(opt, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", AROUND)
def test_values_pass_through_transformations_around_it(group, name, compiled):
    around = AROUND[name]
    want = train(around(optax.polyak_sgd(0.5)), names=["value"], compiled=True)
    opt = around(ss.DistributedOptimizer(group, optax.polyak_sgd(0.5)))
    got = train(opt, group.rank, group.size, names=["value"], compiled=compiled)
    assert group.same({"w": got})
    if name != "accumulated":  # whose last value alone counts, in one process too
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def recording():
    """A transformation that returns the arguments it got as its state."""
    return optax.GradientTransformationExtraArgs(
        lambda params: None, lambda g, state, params, **extra: (g, extra)
    )


def update(group, *, op=ss.AVG, weight=None, grads=None, **extra):
    grads = jnp.ones(2) if grads is None else grads
    weights = {} if weight is None else {"weight": weight}
    return ss.DistributedOptimizer(group, recording(), op=op).update(
        grads, None, jnp.ones(2), **weights, **extra
    )


def test_values_and_gradients_are_reduced_as_the_gradients_are(group):
    grads = {"w": jnp.full(2, group.rank + 1.0)}
    mean, total = (group.size + 1) / 2, sum(range(group.size + 1))
    weighted = sum((rank + 1) ** 2 for rank in range(group.size)) / total
    for options, want in (({}, mean), ({"op": ss.SUM}, total), ({"weight": group.rank + 1}, weighted)):
        for value in (
            group.rank + 1,
            group.rank + 1.0,
            np.float32(group.rank + 1),
            jnp.float32(group.rank + 1),
        ):
            got, extra = update(group, grads=grads, value=value, grad={"v": grads["w"]}, **options)
            np.testing.assert_allclose([got["w"][0], extra["grad"]["v"][1], extra["value"]], want, rtol=1e-6)
        got, extra = update(group, grads=grads, grad=grads, **options)
        assert group.size == 1 or extra["grad"] is got


@pytest.mark.parametrize("whole", [int, np.int64, np.array, jnp.int32, jnp.uint8])
def test_the_mean_of_a_whole_value_keeps_its_fraction(group, whole):
    _, extra = update(group, value=whole(int(group.rank == 0)))
    assert float(extra["value"]) == pytest.approx(1 / group.size)
    compiled = jax.jit(lambda v: update(group, value=v)[1]["value"])
    assert float(compiled(jnp.int32(group.rank == 0))) == pytest.approx(1 / group.size)


def test_gradients_of_numpy_that_come_twice_are_reduced_once(group):
    grads = np.full(2, group.rank + 1.0)
    got, extra = update(group, op=ss.SUM, grads=grads, grad=[grads], value=1.0)
    np.testing.assert_array_equal(got, sum(range(group.size + 1)))
    np.testing.assert_array_equal(extra["grad"][0], got)


EQUAL = {
    "array": jnp.arange(3),
    "key": jax.random.key(1),
    "tree": {"a": np.ones(2), "b": [None, "text", 3]},
    "text": "nesterov",
    "flag": True,
    "none": None,
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_everywhere_is_passed_on(group, name):
    _, extra = update(group, given=EQUAL[name])
    assert extra["given"] is EQUAL[name]


DIFFERENT = {
    "array": lambda rank: jnp.arange(3) + rank,
    "key": jax.random.key,
    "flag": lambda rank: rank == 0,
    "text": str,
    "shape": lambda rank: np.ones(rank + 1),
    "function here": lambda rank: len if rank == 0 else 3,
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_an_error_on_all_ranks(group, name):
    if group.size > 1:
        with pytest.raises(
            ss.MismatchError, match=r"DistributedOptimizer.update in group .*leaf \['given'\]"
        ):
            update(group, given=DIFFERENT[name](group.rank), value=1.0)
    assert group.allreduce(1) == group.size


def test_what_differs_is_an_error_in_compiled_functions_too(group):
    opt = ss.DistributedOptimizer(group, recording())
    step = jax.jit(lambda g, key: opt.update(g, None, None, key=key)[0])
    np.testing.assert_array_equal(step(jnp.ones(2), jax.random.key(0)), 1.0)
    if group.size > 1:
        with pytest.raises(ss.MismatchError, match=r"leaf \['key'\]"):
            jax.block_until_ready(step(jnp.ones(2), jax.random.key(group.rank)))


REFUSED = {
    "function": (lambda _: lambda w: w, {}, r"obj_fn is a function.*averaged\(backend, obj_fn\)"),
    "in a tree": (lambda _: [len], {}, "obj_fn is a function"),
    "object": (lambda _: object(), {}, "obj_fn is of type object, which ranks cannot compare"),
    "sum": (lambda group: averaged(group, len), {"op": ss.SUM}, "obj_fn is a function, .*op other than AVG"),
    "weight": (lambda group: averaged(group, len), {"weight": 2}, "obj_fn is a function, .*weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_be_of_a_rank_alone_is_refused(group, name):
    make, options, text = REFUSED[name]
    if group.size > 1:
        with pytest.raises(ss.InvalidArgumentError, match=text):
            update(group, obj_fn=make(group), **options)
        with pytest.raises(
            ss.InvalidArgumentError, match="is a function, which the optimizer would call with this"
        ):
            opt = ss.ShardedOptimizer(group, recording(), elementwise=True)
            opt.update(jnp.ones(2), None, jnp.ones(2), value_fn=len)
    assert group.allreduce(1) == group.size


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_the_mean_of_functions_and_its_gradient(group, compiled):
    mean = averaged(group, lambda w, power: jnp.sum(w**power) * (group.rank + 1.0))
    assert averaged(group, mean) is mean
    transformed = jax.value_and_grad(mean)
    value, grads = (jax.jit(transformed) if compiled else transformed)(jnp.array([1.0, 3.0]), 2)
    np.testing.assert_allclose(value, 10 * (group.size + 1) / 2, rtol=1e-6)
    np.testing.assert_allclose(grads, np.array([2.0, 6.0]) * (group.size + 1) / 2, rtol=1e-6)
    _, extra = update(group, obj_fn=mean)
    assert extra["obj_fn"] is mean


def test_an_optimizer_whose_state_is_divided(group):
    def scale(grads, state, params, *, value, grad):
        assert grad["w"].shape == grads["w"].shape == params["w"].shape
        return {"w": grads["w"] * value + grad["w"]}, state

    opt = ss.ShardedOptimizer(
        group, optax.GradientTransformationExtraArgs(lambda params: (), scale), elementwise=True
    )
    grads, params = {"w": jnp.full(200, group.rank + 1.0)}, {"w": jnp.ones(200)}
    updates, _ = opt.update(grads, opt.init(params), params, value=group.rank * 2.0, grad=grads)
    mean = (group.size + 1) / 2
    np.testing.assert_allclose(updates["w"], np.full(200, mean * (group.size - 1) + mean), rtol=1e-6)


def test_optimizers_of_numpy_with_arguments_by_keyword(group):
    class Polyak:
        def init(self, params):
            return ()

        def update(self, grads, state, params, how, *, value):
            assert how == "l2"
            return [-value * g / (g @ g) for g in grads], state

    opt = ss.DistributedOptimizer(group, Polyak())
    grads = [np.full(4, group.rank + 1.0)]
    (step,), _ = opt.update(grads, (), [np.ones(4)], "l2", value=float(group.rank))
    mean = (group.size + 1) / 2
    np.testing.assert_allclose(step, -(group.size - 1) / 2 / (4 * mean))
    if group.size > 1:
        with pytest.raises(ss.MismatchError, match=r"leaf \['argument 4'\]"):
            opt.update(grads, (), [np.ones(4)], str(group.rank), value=1.0)


def test_values_are_not_compared_between_ranks(group, monkeypatch):
    monkeypatch.setenv("SAMESTEP_VERIFY", "1")
    _, extra = update(group, value=float(group.rank))
    assert extra["value"] == (group.size - 1) / 2

"""Sharding refuses optimizers that do not update element by element."""

import math

import numpy as np
import pytest
import samestep as ss
from optimizers import Pair, each

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def clipped(limit):
    def update(grads, state, params=None):
        norm = math.sqrt(sum(float((g.astype("f8") ** 2).sum()) for g in grads.values()))
        return each(lambda g: g * min(1.0, limit / max(norm, 1e-30)), grads), state

    return Pair(lambda params: (), update)


def layer_wise():
    def update(grads, state, params):
        return each(lambda g, p: g * (np.linalg.norm(p) / (np.linalg.norm(g) + 1e-30)), grads, params), state

    return Pair(lambda params: (), update)


def factored():
    def update(grads, state, params=None):
        return each(lambda g: g / np.sqrt((g**2).mean(axis=-1, keepdims=True) + 1e-30), grads), state

    return Pair(lambda params: (), update)


def centred():
    """As optax.centralize: the mean of each row is subtracted."""

    def update(grads, state, params=None):
        return each(lambda g: g - g.mean(axis=tuple(range(1, g.ndim)), keepdims=True), grads), state

    return Pair(lambda params: (), update)


def shampoo():
    """A preconditioner for each axis, from all gradients so far; diagonal for vectors, as in Gupta et al., 2018."""

    def init(params):
        return each(
            lambda p: [np.eye(n) * 1e-4 for n in p.shape] if p.ndim == 2 else np.zeros(p.shape), params
        )

    def update(grads, state, params=None):
        updates, new = {}, {}
        for name, g in grads.items():
            if g.ndim != 2:
                new[name] = state[name] + g**2
                updates[name] = -g / np.sqrt(new[name] + 1e-30)
                continue
            new[name] = [state[name][0] + g @ g.T, state[name][1] + g.T @ g]
            updates[name] = -inverse_root(new[name][0]) @ g @ inverse_root(new[name][1])
        return updates, new

    return Pair(init, update)


def inverse_root(matrix):
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.maximum(values, 1e-12) ** -0.25) @ vectors.T


@pytest.mark.parametrize("make", [lambda: clipped(1.0), lambda: clipped(1e4), layer_wise, factored, shampoo])
def test_what_does_not_work_element_by_element_is_refused(group, make):
    opt = ss.ShardedOptimizer(group, make())
    params = {"w": np.ones((30, 20)), "v": np.ones(50)}
    with pytest.raises(ss.InvalidArgumentError, match=r"Pair does not update element by element: .*leaf \['"):
        opt.init(params)
    ss.ShardedOptimizer(group, make(), elementwise=True).init(params)


def test_a_norm_over_leaves_of_one_element_is_seen(group):
    with pytest.raises(ss.InvalidArgumentError, match="Pair does not update element by element"):
        ss.ShardedOptimizer(group, clipped(1.0)).init(
            {"a": np.ones(1), "b": np.array(2.0), "c": np.ones((1, 1))}
        )


@pytest.mark.parametrize("shape", [(2, 3), (2, 1), (2, 3, 4), (4, 1), (1, 5), (2, 512), (6, 5)])
@pytest.mark.parametrize("make", [centred, factored])
def test_what_works_row_by_row_is_refused_wherever_its_rows_end(group, make, shape):
    for params in ({"w": np.ones(shape)}, {"v": np.ones(7), "w": np.ones(shape)}):
        with pytest.raises(ss.InvalidArgumentError, match=r"Pair .*elementwise=True"):
            ss.ShardedOptimizer(group, make()).init(params)


def finite_only():
    """As optax.apply_if_finite: no step at all if one element is not finite."""

    def update(grads, state, params=None):
        is_finite = all(np.isfinite(g).all() for g in grads.values())
        return each(lambda g: -0.1 * g if is_finite else np.zeros_like(g), grads), state

    return Pair(lambda params: (), update)


def estimating():
    """As Prodigy: a norm over all gradients, which rules the updates only later."""

    def update(grads, state, params=None):
        norm = state["norm"] + math.fsum(float(abs(g).sum()) for g in grads.values())
        return each(lambda g: -0.1 * g * (10 if state["count"] > 9 and norm > 1 else 1), grads), {
            "count": state["count"] + 1,
            "norm": norm,
        }

    return Pair(lambda params: {"count": 0, "norm": 0.0}, update)


@pytest.mark.parametrize("make", [finite_only, estimating])
@pytest.mark.parametrize(
    "params", [{"w": np.ones((30, 20))}, {"a": np.array(1.0), "b": np.ones(1), "v": np.ones(3)}]
)
def test_what_holds_for_all_elements_together_is_refused(group, make, params):
    with pytest.raises(ss.InvalidArgumentError, match="Pair does not update element by element"):
        ss.ShardedOptimizer(group, make()).init(params)


def test_elements_that_are_not_finite_are_no_matter_of_others(group):
    def update(grads, state, params=None):
        found = {name: bool(np.isnan(g).any()) for name, g in grads.items()}
        return each(lambda g: np.where(np.isnan(g), 0.0, -0.1 * g), grads), found

    without_nan = Pair(lambda params: each(lambda _: False, params), update)
    ss.ShardedOptimizer(group, without_nan).init({"w": np.ones((3, 2)), "v": np.ones(1)})


def test_a_state_that_joins_parameters_cannot_be_gathered(group):
    def update(grads, state, params=None):
        return each(lambda g: -0.1 * g, grads), state

    joined = Pair(lambda params: np.concatenate([p.reshape(-1) for p in params.values()]), update)
    opt, params = ss.ShardedOptimizer(group, joined), {"w": np.ones((3, 2)), "v": np.ones(7)}
    state = opt.init(params)
    if group.size > 1:
        with pytest.raises(ss.InvalidArgumentError, match="the shape of no parameter"):
            ss.optimizer.gather_state(opt, state, params)

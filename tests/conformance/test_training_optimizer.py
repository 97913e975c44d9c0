"""`DistributedOptimizer` over optimizers of the init/update kind."""

from typing import NamedTuple

import numpy as np
import pytest
import samestep as ss
from reference import assert_same

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


class Momentum:
    """An optimizer of the init/update kind that owes nothing to any library."""

    def __init__(self, learning_rate):
        self.learning_rate = learning_rate

    def init(self, params):
        return {"velocity": {key: np.zeros_like(value) for key, value in params.items()}}

    def update(self, grads, state, params=None):
        velocity = {key: 0.9 * state["velocity"][key] + grads[key] for key in grads}
        return {key: -self.learning_rate * v for key, v in velocity.items()}, {"velocity": velocity}


class Transformation(NamedTuple):
    init: object
    update: object


def momentum_pair(learning_rate):
    inner = Momentum(learning_rate)
    return Transformation(inner.init, inner.update)


@pytest.mark.parametrize("make", [Momentum, momentum_pair])
def test_the_update_with_mean_gradients_is_that_of_one_process(group, make):
    params = {"a": np.ones(3), "b": np.zeros((2, 2))}
    grads = {"a": np.full(3, group.rank + 1.0), "b": np.full((2, 2), -group.rank - 1.0)}
    mean = (group.size + 1) / 2
    plain, wrapped = make(0.1), ss.DistributedOptimizer(group, make(0.1))

    state, wrapped_state = plain.init(params), wrapped.init(params)
    assert list(state) == list(wrapped_state)
    for key in params:
        assert_same(wrapped_state["velocity"][key], state["velocity"][key])
    wrapped_state = ss.synchronize(group, wrapped_state)
    for _ in range(3):
        want, state = plain.update({"a": np.full(3, mean), "b": np.full((2, 2), -mean)}, state, params)
        copies = {key: value.copy() for key, value in grads.items()}
        got, wrapped_state = wrapped.update(copies, wrapped_state, params)
        for key in params:
            np.testing.assert_allclose(got[key], want[key], rtol=1e-12)


def test_sums_on_request(group):
    grads = {"a": np.ones(2)}
    wrapped = ss.DistributedOptimizer(group, Momentum(0.1), op=ss.SUM)
    got, _ = wrapped.update(grads, wrapped.init({"a": np.ones(2)}))
    np.testing.assert_allclose(got["a"], -0.1 * group.size)


def test_the_type_of_a_pair_and_the_options_of_an_object_remain(group):
    assert type(ss.DistributedOptimizer(group, momentum_pair(0.1))) is Transformation
    inner = Momentum(0.1)
    wrapped = ss.DistributedOptimizer(group, inner)
    wrapped.learning_rate = 0.5
    assert inner.learning_rate == wrapped.learning_rate == 0.5
    got, _ = wrapped.update({"a": np.ones(2)}, wrapped.init({"a": np.ones(2)}))
    np.testing.assert_allclose(got["a"], -0.5)


@pytest.mark.parametrize("thing", [3, "adam", object(), Momentum])
def test_things_that_are_no_optimizers(group, thing):
    with pytest.raises(
        TypeError, match=r"neither a torch Optimizer nor an object with init\(params\) and update"
    ):
        ss.DistributedOptimizer(group, thing)

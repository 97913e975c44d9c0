"""Trees that count as much as their rank's batch is long: the gradient of the joined batch."""

import operator
from typing import NamedTuple

import numpy as np
import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

LENGTHS = [3, 7, 0, 12]
X = np.random.default_rng(5).standard_normal((22, 4))
Y = np.random.default_rng(6).standard_normal(22)
PARAMS = np.array([0.5, -1.0, 2.0, 0.25])


def gradient(rows):
    """Of the mean squared error over some rows."""
    return X[rows].T @ (X[rows] @ PARAMS - Y[rows]) / max(1, len(Y[rows]))


def rows_of(rank):
    return slice(sum(LENGTHS[:rank]), sum(LENGTHS[: rank + 1]))


def joined(group):
    return gradient(slice(0, sum(LENGTHS[: group.size])))


def test_the_weighted_mean_is_the_gradient_of_the_joined_batch(group):
    mine = {"w": gradient(rows_of(group.rank)), "b": None}
    got = ss.allreduce_gradients(group, mine, weight=LENGTHS[group.rank])
    np.testing.assert_allclose(got["w"], joined(group), rtol=1e-12)
    assert got["b"] is None
    assert got["w"] is mine["w"]
    tree = group.allreduce_tree([gradient(rows_of(group.rank))], "avg", weight=LENGTHS[group.rank])
    np.testing.assert_array_equal(tree[0], got["w"])
    if group.size == 1:
        np.testing.assert_array_equal(got["w"], gradient(rows_of(0)) * 3 / 3)


def test_accumulation_divides_once_where_a_mean_of_means_is_wrong(group):
    """Micro-batches of 5, 5 and the rest: the mean over micro-batches, then over ranks, is not the mean over items."""
    lengths = [12, 6, 11, 1][: group.size]
    edges = np.cumsum([0, *lengths])
    x, y = np.tile(X, (2, 1)), np.tile(Y, 2)

    def grad(start, stop):
        return x[start:stop].T @ (x[start:stop] @ PARAMS - y[start:stop]) / (stop - start)

    start, stop = edges[group.rank], edges[group.rank + 1]
    micro = [(i, min(i + 5, stop)) for i in range(start, stop, 5)]
    whole = grad(0, edges[-1])
    usual = group.allreduce(np.mean([grad(a, b) for a, b in micro], axis=0), "avg")
    assert np.abs(usual - whole).max() > 1e-3
    total = ss.Accumulator(group)
    for a, b in micro:
        total.add(grad(a, b), weight=b - a)
    np.testing.assert_allclose(total.mean(), whole, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_half_types_do_not_overflow_in_the_sum(group, dtype):
    got = group.allreduce_tree([np.full(5, 60_000, dtype)], "avg", weight=1000)
    np.testing.assert_array_equal(got[0], np.full(5, 60_000, dtype))
    assert got[0].dtype == np.dtype(dtype)


def test_a_tree_of_no_weight_is_not_looked_at(group):
    last = group.rank == group.size - 1
    got = group.allreduce_tree([np.full(3, 2.0 if last else np.nan)], "avg", weight=int(last))
    np.testing.assert_array_equal(got[0], np.full(3, 2.0))


def test_all_weights_zero_is_an_error_on_all_ranks(group):
    why = r"^allreduce_gradients\(op=AVG\) in group .*: all weights are zero"
    with pytest.raises(ss.InvalidArgumentError, match=why):
        group.allreduce_gradients([np.ones(2)], weight=0)
    assert group.allreduce(np.ones(1))[0] == group.size


def test_weights_are_for_means(group):
    with pytest.raises(ss.InvalidArgumentError, match="weight is for op AVG"):
        group.allreduce_tree([np.ones(2)], "sum", weight=1)
    for weight in (-1, np.nan, np.inf):
        why = rf"^allreduce_gradients\(op=AVG\): weight must be finite and >= 0, got {weight}"
        with pytest.raises(ss.InvalidArgumentError, match=why):
            group.allreduce_gradients([np.ones(2)], weight=weight)


def test_one_collective_for_the_data(group):
    tree = {"w": np.ones(1000), "v": np.ones((3, 3))}
    group.allreduce_gradients(tree, weight=2)
    before = group.counters().operations
    group.allreduce_gradients(tree, weight=2)
    assert group.counters().operations - before <= 2  # the header and the data


class SGD(NamedTuple):
    """A pair of functions as in optax."""

    init: object = lambda params: ()
    update: object = lambda grads, state, params=None: ([-g for g in grads], state)


class Plain:
    """An object with such methods."""

    init = operator.methodcaller("copy")

    def update(self, grads, state, params=None):
        return [-g for g in grads], state


@pytest.mark.parametrize("opt", [SGD(), Plain()])
def test_optimizers_take_the_weight_of_their_rank(group, opt):
    opt = ss.DistributedOptimizer(group, opt)
    updates, _ = opt.update([gradient(rows_of(group.rank))], (), weight=LENGTHS[group.rank])
    np.testing.assert_allclose(-updates[0], joined(group), rtol=1e-12)
    with pytest.raises(ss.InvalidArgumentError, match="shards and weighted are for torch"):
        ss.DistributedOptimizer(group, SGD(), shards=8)

"""Trees that count as much as their rank's batch is long: the gradient of the joined batch."""

import operator
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import samestep as ss
from reference import COMPLEX, FLOATS, assert_same, reduced, values

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


@pytest.mark.parametrize("name", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("n_elements", [0, 1, 37, 5000, 200_003])
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_bits_are_those_of_products_their_sum_and_one_division(group, name, n_elements, order):
    """Without the elements of a rank of no weight, whatever they are."""
    weights = [0, 7, 0.25, 3] if group.size > 1 else [7]
    rows = [values(rank, (n_elements, 2), name) for rank in range(group.size)]
    if group.size > 1:
        rows[0][...] = np.nan
    mine = np.array(rows[group.rank], order=order)
    got = group.allreduce_gradients({"b": np.ones(3, "f4"), "w": mine}, weight=weights[group.rank])
    assert_same(got["w"], reduced(rows, "mean", weights[: group.size]))
    assert got["w"] is mine
    np.testing.assert_array_equal(got["b"], np.ones(3))


@pytest.mark.parametrize("leaf", [1.5, np.full(3, 1.5, "f4"), [np.arange(4)[::2], "relu", None]])
def test_a_rank_without_a_tree_gets_the_mean_of_the_others(group, leaf):
    last = group.rank == group.size - 1
    tree = None if last and group.size > 1 else {"x": leaf}
    got = group.allreduce_gradients(tree, weight=0 if tree is None else 2)
    np.testing.assert_equal(got, {"x": leaf})


def test_all_weights_zero_is_an_error_on_all_ranks(group):
    why = r"^allreduce_gradients\(op=AVG\) in group .*: all weights are zero"
    with pytest.raises(ss.InvalidArgumentError, match=why):
        group.allreduce_gradients([np.ones(2)], weight=0)
    assert group.allreduce(np.ones(1))[0] == group.size


def test_weights_are_for_means(group):
    with pytest.raises(ss.InvalidArgumentError, match="weight is for op AVG"):
        group.allreduce_tree([np.ones(2)], "sum", weight=1)
    for weight in (-1, np.nan, np.inf):
        why = rf"allreduce_gradients\(op=AVG\): weight must be finite and >= 0, got {weight}"
        with pytest.raises(ss.InvalidArgumentError, match=why):
            group.allreduce_gradients([np.ones(2)], weight=weight)


WHOLE = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("n_elements", [0, 1, 257, 5000])
def test_means_of_integers_are_exact(group, dtype, n_elements):
    """At the limits of the type and with weights up to 2**53, where Python's own numbers are the reference."""
    info = np.iinfo(dtype)
    random = np.random.default_rng(11)
    rows = random.integers(info.min, info.max, (group.size, n_elements), dtype, endpoint=True)
    rows[:, :2] = [info.min, info.max][:n_elements]
    weights = [2**51 - 1, 1, 2**50, 12345][: group.size]
    exact = sum(w * row.astype(object) for w, row in zip(weights, rows, strict=True)) // sum(weights)
    got = group.allreduce_tree({"x": rows[group.rank].copy()}, "avg", weight=weights[group.rank])["x"]
    np.testing.assert_array_equal(got, exact.astype(dtype))
    assert got.dtype == np.dtype(dtype)


@pytest.mark.parametrize("shards", [None, 7, 8])
def test_accumulated_means_of_integers_are_exact(group, shards):
    total = ss.Accumulator(group, shards)
    indices = range(7)[group.rank :: group.size] if shards is None else total.indices
    weights = [2**49 + i for i in range(8)]
    values = [np.array([2**63 - 1, -(2**63), i - 4, -1]) for i in range(8)]
    for i in indices:
        total.add((values[i], 2**62 + i), shard=None if shards is None else i, weight=weights[i])
    n = shards or 7
    array, number = total.mean()
    exact = sum(w * x.astype(object) for w, x in zip(weights[:n], values, strict=False)) // sum(weights[:n])
    assert array.tolist() == exact.tolist()
    assert number == sum(w * (2**62 + i) for i, w in enumerate(weights[:n])) // sum(weights[:n])


def test_torch_means_of_integers_are_exact(group):
    torch = pytest.importorskip("torch")
    value = torch.full((3,), 2**63 - 5)
    got = group.allreduce_gradients({"x": value}, weight=group.rank + 32)["x"]
    assert got is value
    assert value.tolist() == [2**63 - 5] * 3


@pytest.mark.parametrize("options", [{}, {"op": "avg"}, {"op": "avg", "weight": 1}])
@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**30])
def test_numbers_beyond_64_bits_are_refused(group, number, options):
    """They passed as if they were objects, each rank keeping its own."""
    with pytest.raises(ss.InvalidArgumentError, match=r"leaf \['n'\].*64 bits"):
        group.allreduce_tree({"n": number}, **options)
    if group.size > 1:
        with pytest.raises((ss.InvalidArgumentError, ss.MismatchError), match="leaf \\['n'\\]"):
            group.allreduce_tree({"n": number if group.rank else 1}, **options)
    assert group.allreduce_tree({"n": 2**63 - 1}, "max")["n"] == 2**63 - 1


WEIGHTS = [
    ("f4", 1e31),
    ("f2", 1e-31),
    ("c8", 1e300),
    ("f8", 1e300),
    ("f8", 10**400),
    ("f8", 1e-200),
    ("i8", 0.5),
    ("i8", 2**63),
    ("u1", 1e300),
    ("f8", -1),
    ("f8", np.nan),
    ("f8", np.inf),
]


@pytest.mark.parametrize(("dtype", "weight"), WEIGHTS)
def test_a_weight_that_one_rank_refuses_is_an_error_on_all(group, dtype, weight):
    last = group.rank == group.size - 1
    x = np.ones(2, dtype)
    with pytest.raises(ss.InvalidArgumentError, match="weight") as caught:
        group.allreduce_gradients({"x": x}, weight=weight if last else 1)
    assert last or f"rank {group.size - 1}" in str(caught.value)
    np.testing.assert_array_equal(x, np.ones(2))
    assert group.allreduce(np.ones(1))[0] == group.size


@pytest.mark.parametrize("dtype", ["i8", "f4"])
def test_a_sum_of_weights_that_is_too_large_is_an_error_on_all_ranks(group, dtype):
    weight = {"i8": 2**52, "f4": 6e29}[dtype]
    total = ss.Accumulator(group)
    for _ in range(2):
        total.add([np.ones(2, dtype)], weight=weight)
    with pytest.raises(ss.InvalidArgumentError, match=r"the weights sum up to \S+; where leaves"):
        total.mean()
    total.add([np.ones(2, dtype)])
    np.testing.assert_array_equal(total.mean()[0], np.ones(2))


def test_weights_whose_sum_overflows_are_an_error_on_all_ranks(group):
    with pytest.raises(ss.InvalidArgumentError, match=r"weights? "):
        group.allreduce_gradients({"x": np.ones(2)}, weight=1.5e308)
    assert group.allreduce(np.ones(1))[0] == group.size


@pytest.mark.parametrize("weight", [Fraction(3, 2), np.float32(0.25), np.int8(3), True, 1e-20, 1e20])
def test_weights_may_be_any_real_number(group, weight):
    got = group.allreduce_gradients([np.full(3, 1.5)], weight=weight)
    np.testing.assert_allclose(got[0], np.full(3, 1.5), rtol=1e-15)


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

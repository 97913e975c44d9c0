"""Reducing trees: fused, in place, and None as zeros."""

import operator

import numpy as np
import pytest
import samestep as ss
from reference import assert_same, reduced, values

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def gradients(rank):
    return {
        "w": values(rank, (3, 5), "float32"),
        "b": [values(rank, 7, "float64"), values(rank, 0, "float32")],
    }


def expected(group, op, make=gradients):
    trees = [make(rank) for rank in range(group.size)]
    pick = [lambda t: t["w"], lambda t: t["b"][0], lambda t: t["b"][1]]
    return [reduced([p(tree) for tree in trees], op) for p in pick]


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "prod"])
def test_each_leaf_is_what_allreduce_gives(group, op):
    tree = gradients(group.rank)
    got = group.allreduce_tree(tree, op)
    for value, want in zip((got["w"], *got["b"]), expected(group, op), strict=True):
        assert_same(value, want)
    assert got["w"] is tree["w"]
    assert got["b"][0] is tree["b"][0]


def test_gradients_are_averaged_unless_told_otherwise(group):
    assert_same(ss.allreduce_gradients(group, gradients(group.rank))["w"], expected(group, "avg")[0])
    assert_same(ss.allreduce_gradients(group, gradients(group.rank), ss.SUM)["w"], expected(group, "sum")[0])
    assert_same(
        group.allreduce_gradients(gradients(group.rank), operator.add)["w"], expected(group, "sum")[0]
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "uint8", "complex64"])
def test_other_dtypes_in_buckets(group, dtype):
    tree = [values(group.rank, 5, dtype), values(group.rank, (2, 2), dtype)]
    for i, got in enumerate(group.allreduce_tree(tree, "sum")):
        shape = (5, (2, 2))[i]
        assert_same(got, reduced([values(rank, shape, dtype) for rank in range(group.size)], "sum"))


def test_the_bits_do_not_depend_on_what_shares_the_message(group):
    alone = group.allreduce_tree([values(group.rank, 1000, "float32")], "avg")[0]
    others = [values(group.rank, n, "float32", seed=n) for n in (1, 333, 70_000)]
    together = group.allreduce_tree([*others, values(group.rank, 1000, "float32"), *others[:0]], "avg")[-1]
    assert_same(alone, together)


def test_numbers_are_reduced_and_flags_and_texts_are_not(group):
    tree = {
        "loss": float(group.rank),
        "n": 2,
        "rate": np.float32(group.rank),
        "on": True,
        "name": "x",
        "none": None,
    }
    got = group.allreduce_tree(tree, "sum")
    ranks = sum(range(group.size))
    assert got == {
        "loss": float(ranks),
        "n": 2 * group.size,
        "rate": ranks,
        "on": True,
        "name": "x",
        "none": None,
    }
    assert [type(got[key]) for key in ("loss", "n", "rate")] == [float, int, np.float32]


def test_none_counts_as_zeros_where_any_rank_has_a_gradient(group):
    has = group.rank == group.size - 1
    tree = {"a": np.ones(3), "b": np.full((2, 2), 6.0, "f4") if has else None, "c": None}
    got = ss.allreduce_gradients(group, tree)
    assert_same(got["a"], np.ones(3))
    assert_same(got["b"], np.full((2, 2), np.float32(6) * np.float32(1 / group.size), "f4"))
    assert got["c"] is None


def test_none_where_others_have_an_array_twice(group):
    x = np.full(3, group.rank + 1.0)
    has = group.rank < max(1, group.size - 1)
    tree = {"a": x, "b": x} if has else {"a": None, "b": None}
    got = group.allreduce_tree(tree, "sum")
    n = max(1, group.size - 1)
    assert_same(got["a"], np.full(3, n * (n + 1) / 2))
    assert_same(got["b"], got["a"])
    assert group.allreduce(1) == group.size


@pytest.mark.ranks(2, 3)
def test_none_for_one_of_two_places_where_others_have_one_array(group):
    x = np.ones(3)
    tree = {"a": x, "b": None if group.rank else x}
    with pytest.raises(
        ss.MismatchError, match=r"leaf \['b'\] is the array \['a'\] again on rank 0 and None on rank"
    ):
        group.allreduce_tree(tree, "sum")
    assert group.allreduce(1) == group.size


@pytest.mark.parametrize("count", [4, 200_003])
def test_an_array_in_two_places_is_reduced_once(group, count):
    shared = np.ones(count)
    got = group.allreduce_tree({"a": shared, "b": shared, "c": [shared[:]]}, "sum")
    assert got["a"] is got["b"] is shared
    assert_same(shared, np.full(count, float(group.size)))


def test_large_arrays_are_reduced_where_they_lie(group):
    tree = [values(group.rank, 200_003, "float64"), np.ones(3), values(group.rank, (500, 400), "float64").T]
    got = group.allreduce_tree(tree, "sum")
    assert got[0] is tree[0]
    assert got[2] is tree[2]
    assert_same(got[0], reduced([values(rank, 200_003, "float64") for rank in range(group.size)], "sum"))
    transposed = reduced([values(rank, (500, 400), "float64") for rank in range(group.size)], "sum").T
    np.testing.assert_array_equal(got[2], transposed)


def test_arrays_that_cannot_be_written_are_replaced(group):
    fixed = np.ones(3)
    fixed.flags.writeable = False
    got = group.allreduce_tree((fixed, fixed), "sum")
    for value in got:
        assert_same(value, np.full(3, float(group.size)))
    assert_same(fixed, np.ones(3))


def test_few_messages(group):
    tree = [np.ones(2500, "f4") for _ in range(200)]
    group.allreduce_tree(tree, "max")
    before = group.counters().operations
    group.allreduce_tree(tree, "max")
    assert group.counters().operations - before <= 3


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("changed", ["shape", "dtype", "name"])
def test_a_difference_raises_everywhere_and_names_the_leaf(group, changed):
    last = group.rank == group.size - 1
    tree = {"a": np.ones(2), "b": np.ones(3)}
    if last:
        tree["b"] = {"shape": np.ones(4), "dtype": np.ones(3, "f4"), "name": None}[changed]
        if changed == "name":
            tree["bb"] = tree.pop("b")
    with pytest.raises(ss.MismatchError, match=rf"leaf \['b'\].*on rank {group.size - 1}"):
        group.allreduce_tree(tree, "sum")
    assert_same(tree["a"], np.ones(2))
    assert_same(group.allreduce_tree([np.ones(1)], "sum")[0], np.array([float(group.size)]))


@pytest.mark.ranks(2, 3)
def test_operators_must_agree(group):
    with pytest.raises(ss.MismatchError, match=r"op=SUM\) on rank 0 and .*op=MAX"):
        group.allreduce_tree([np.ones(2)], "max" if group.rank else "sum")


def test_every_rank_may_weigh_its_gradients(group):
    weights = [rank + 1.0 for rank in range(group.size)]
    got = group.allreduce_tree([np.ones(2)], ss.premul(weights[group.rank] / sum(weights)))
    np.testing.assert_allclose(got[0], 1)


def test_things_that_are_no_trees(group):
    with pytest.raises(
        ss.InvalidArgumentError, match=r"generator is not a tree of arrays.*must become a list"
    ):
        ss.allreduce_gradients(group, (np.ones(1) for _ in range(2)))
    with pytest.raises(ss.InvalidArgumentError, match="is not a reduction"):
        group.allreduce_tree([np.ones(1)], "mean of some kind")
    assert group.allreduce_tree([], "sum") == []

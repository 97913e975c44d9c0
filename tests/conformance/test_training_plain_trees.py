"""Trees reduced on the fast path, in C++ alone, give what the general path gives; ranks may take different paths."""

import collections

import numpy as np
import pytest
import samestep as ss
from reference import assert_same, reduced, values

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SHAPES = [(5,), (0, 3), (40_000,), (), (7, 1001), (150_000,), (2,), (33_000,)]  # packed, across pieces, large
DTYPES = ["float32", "float64", "float32", "int32", "float32", "float32", "uint8", "float16"]


def tree_of(rank):
    leaves = [values(rank, shape, dtype) for shape, dtype in zip(SHAPES, DTYPES, strict=True)]
    return {
        "z": leaves[:3],
        "a": {"y": (leaves[3], leaves[4]), "b": leaves[5]},
        "m": [leaves[6], [leaves[7]]],
    }


def leaves_of(tree):
    return [*tree["z"], *tree["a"]["y"], tree["a"]["b"], tree["m"][0], tree["m"][1][0]]


def test_synchronize(group):
    for root in range(group.size):
        tree = tree_of(group.rank)
        got = ss.synchronize(group, tree, root=root)
        assert got is not tree
        assert got["a"] is not tree["a"]
        assert list(got) == list(tree)
        pairs = zip(leaves_of(got), leaves_of(tree), leaves_of(tree_of(root)), strict=True)
        for value, mine, roots in pairs:
            assert value is mine
            assert_same(value, roots)


@pytest.mark.parametrize("op", ["sum", "max"])
def test_allreduce_tree(group, op):
    tree = tree_of(group.rank)
    got = group.allreduce_tree(tree, op)
    by_rank = [leaves_of(tree_of(rank)) for rank in range(group.size)]
    for i, (value, mine) in enumerate(zip(leaves_of(got), leaves_of(tree), strict=True)):
        assert value is mine
        assert_same(value, reduced([leaves[i] for leaves in by_rank], op))


@pytest.mark.parametrize("verb", ["synchronize", "allreduce"])
def test_the_order_of_keys_and_the_way_may_differ(group, verb):
    tree = {"b": values(group.rank, 3, "float32"), "a": values(group.rank, 4, "float32")}
    if group.rank % 2 == 1:
        tree = dict(reversed(tree.items()))
    if group.rank == group.size - 1:  # no plain tree here: this rank takes the general path, and so do all
        tree["a"].flags.writeable = False
    got = ss.synchronize(group, tree) if verb == "synchronize" else group.allreduce_tree(tree)
    for key, shape in (("a", 4), ("b", 3)):
        gathered = [values(rank, shape, "float32") for rank in range(group.size)]
        assert_same(got[key], gathered[0] if verb == "synchronize" else reduced(gathered, "sum"))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "other",
    [
        lambda tree: {**tree, "extra": np.ones(2)},
        lambda tree: {"w": tree["w"], "v": tree["b"]},
        lambda tree: {**tree, "b": tree["b"].astype("f4")},
        lambda tree: {**tree, "b": tree["b"].reshape(2, 2)},
        lambda tree: {**tree, "b": (tree["b"],)},
    ],
    ids=["one more", "another name", "another dtype", "another shape", "deeper"],
)
def test_trees_that_differ_are_refused_everywhere(group, other):
    tree = {"w": values(group.rank, 3, "float64"), "b": values(group.rank, 4, "float64")}
    if group.rank == 1:
        tree = other(tree)
    before = [leaf.copy() for leaf in tree.values() if isinstance(leaf, np.ndarray)]
    with pytest.raises(ss.MismatchError, match="leaf"):
        ss.synchronize(group, tree)
    for leaf, was in zip(
        [leaf for leaf in tree.values() if isinstance(leaf, np.ndarray)], before, strict=True
    ):
        assert_same(leaf, was)
    assert ss.synchronize(group, {"w": np.full(2, group.rank)})["w"].tolist() == [0, 0]


@pytest.mark.ranks(2, 3)
def test_calls_that_differ_are_refused_everywhere(group):
    tree = [np.ones(3)]
    with pytest.raises(ss.MismatchError, match="the same call"):
        ss.synchronize(group, tree, root=0 if group.rank else 1)
    with pytest.raises(ss.MismatchError, match="the same call"):
        group.allreduce_tree(tree, "max" if group.rank else "sum")


def test_leaves_in_one_place(group):
    shared = values(group.rank, 6, "float64")
    got = group.allreduce_tree({"whole": shared, "again": shared})
    assert_same(got["whole"], reduced([values(rank, 6, "float64") for rank in range(group.size)], "sum"))
    assert got["again"] is got["whole"]


def test_one_dtype_that_the_operator_refuses_leaves_all_as_they_were(group):
    tree = [np.ones(300_000), np.ones(4), np.ones(2, bool)]
    with pytest.raises(ss.InvalidArgumentError):
        group.allreduce_tree(tree, "avg")
    assert all(leaf.min() == leaf.max() == 1 for leaf in tree)


def test_other_mappings_go_the_general_way(group):
    tree = collections.OrderedDict(b=values(group.rank, 3, "float32"), a=[values(group.rank, 2, "float32")])
    got = ss.synchronize(group, tree)
    assert type(got) is collections.OrderedDict
    assert_same(got["a"][0], values(0, 2, "float32"))

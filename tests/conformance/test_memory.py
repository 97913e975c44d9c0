"""Arrays that a group makes, and whole trees in one operation."""

import numpy as np
import pytest
import samestep as ss
from reference import assert_same, reduced, values
from samestep.arrays.numpy_memory import available_memory

pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.mark.parametrize("shape", [(), 0, 5, (2, 3), (0, 4), 100_000], ids=str)
def test_empty_and_zeros(group, shape):
    for name in ("float32", "int8", "complex128", "bool"):
        x = group.empty(shape, name)
        assert (x.shape, x.dtype) == (np.empty(shape).shape, np.dtype(name))
        assert x.flags.c_contiguous
        assert x.flags.writeable
        zeros = group.zeros(shape, name)
        assert not zeros.any()
        assert zeros.dtype == x.dtype
        x[...] = group.rank > 0
        assert group.allreduce(x, "max" if name != "complex128" else "sum") is x


def test_operations_on_them_and_on_parts_of_them(group):
    inputs = [values(rank, 10_000, "float32") for rank in range(group.size)]
    x = group.empty(10_000, "float32")
    x[:] = inputs[group.rank]
    group.allreduce(x[100:5000])
    group.allreduce(x[5000::7])
    expected = inputs[group.rank].copy()
    expected[100:5000] = reduced([a[100:5000] for a in inputs], "sum")
    expected[5000::7] = reduced([a[5000::7] for a in inputs], "sum")
    assert_same(np.asarray(x), expected)


def test_empty_like_a_tree(group):
    tree = {
        "w": np.ones((2, 3), "f4"),
        "more": [np.zeros(0, "i8"), {"b": np.ones(())}],
        "step": 3,
        "none": None,
    }
    got = group.empty_like(tree)
    assert got["w"].shape == (2, 3)
    assert got["w"].dtype == np.float32
    assert got["w"] is not tree["w"]
    assert got["more"][0].dtype == np.int64
    assert got["more"][1]["b"].shape == ()
    assert got["step"] == 3
    assert got["none"] is None


def test_negative_sizes(group):
    for shape in (-1, (2, -3)):
        with pytest.raises(ValueError, match="negative"):
            group.empty(shape)


def test_a_tree_in_one_operation(group):
    def tree_of(rank):
        return {
            "layers": [
                {"w": values(rank, (7, 5), "float32", seed=i), "b": values(rank, 3, "float32")}
                for i in range(20)
            ],
            "big": values(rank, 200_000, "float32"),
            "counts": values(rank, 9, "int64"),
            "empty": np.empty(0, "float32"),
        }

    tree, trees = tree_of(group.rank), [tree_of(rank) for rank in range(group.size)]
    before = group.counters().messages
    group.allreduce(tree["big"].copy())
    alone = group.counters().messages - before
    got = group.allreduce_tree(tree)
    in_all = group.counters().messages - before - alone
    assert in_all - alone < 10, "the 42 short leaves must not cost a message each"
    assert_same(got["big"], reduced([t["big"] for t in trees], "sum"))
    assert_same(got["counts"], reduced([t["counts"] for t in trees], "sum"))
    for i, layer in enumerate(got["layers"]):
        for key in ("w", "b"):
            assert_same(layer[key], reduced([t["layers"][i][key] for t in trees], "sum"), f"layer {i} {key}")
    assert got["big"] is tree["big"]


def test_a_tree_without_arrays(group):
    assert group.allreduce_tree({}) == {}
    assert group.allreduce_tree([None, ()]) == [None, ()]


def test_counters_grow(group):
    before = group.counters()
    group.allreduce(np.ones(10))
    after = group.counters()
    assert after.operations == before.operations + 1
    assert (after.bytes > before.bytes) == (group.size > 1)


def test_trees_that_differ_are_refused_on_all_ranks(group):
    if group.size == 1:
        pytest.skip("takes two ranks")
    tree = {"a": np.ones(2), "b": np.ones(3 if group.rank == 0 else 4)}
    with pytest.raises(ss.MismatchError, match="b"):
        group.synchronize(tree)
    assert group.allreduce(1) == group.size


@pytest.mark.parametrize("verb", ["empty", "zeros"])
def test_an_array_larger_than_memory_is_refused_at_once(group, verb):
    available = available_memory()
    with pytest.raises(MemoryError, match=f"{verb}: an array of .* bytes are available"):
        getattr(group, verb)(available // 4, "float64")  # twice as much
    assert available_memory() > available // 2

"""Arrays in device memory that are dense but not row-major are taken as they lie, by operations on single elements."""

from __future__ import annotations

import sys

import fake_arrays
import numpy as np
import pytest
import samestep as ss
from samestep import _core
from samestep.errors import InvalidArgumentError

WORLDS = ["fakes", "staged-native"]
ranks = pytest.mark.ranks(1, 2, 3, backends=WORLDS)
KINDS = [fake_arrays.Array, fake_arrays.ConvertingArray]
CHANNELS_LAST = (0, 2, 3, 1)
SHAPES = [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 40, 999), (2, 3, 1, 1), (0, 3, 4, 5)]
shapes = pytest.mark.parametrize("shape", SHAPES)


def values(rank, shape):
    return (np.arange(np.prod(shape)) % 1000 * (rank + 1)).reshape(shape).astype("float32")


def channels_last(rank, shape):
    return fake_arrays.Array.in_order(values(rank, shape), CHANNELS_LAST, fake_arrays.Stream())


def host(x):
    return x.get() if isinstance(x, fake_arrays.Array) else x.numpy()


def total(group, shape):
    return sum(values(r, shape) for r in range(group.size)) + np.zeros(shape, "float32")


@ranks
@shapes
def test_reductions_in_place(group, shape):
    x = channels_last(group.rank, shape)
    assert group.allreduce(x) is x
    np.testing.assert_array_equal(x.get(), total(group, shape))
    x = channels_last(group.rank, shape)
    group.reduce(x, root=group.size - 1)
    at_root = group.rank == group.size - 1
    np.testing.assert_array_equal(x.get(), total(group, shape) if at_root else values(group.rank, shape))


@ranks
@shapes
def test_a_result_elsewhere(group, shape):
    x, out = channels_last(group.rank, shape), channels_last(7, shape)
    assert group.allreduce(x, out=out) is out
    np.testing.assert_array_equal(out.get(), total(group, shape))
    np.testing.assert_array_equal(x.get(), values(group.rank, shape))


@ranks
@shapes
def test_bcast(group, shape):
    x = channels_last(group.rank, shape)
    group.bcast(x, root=group.size - 1)
    np.testing.assert_array_equal(x.get(), values(group.size - 1, shape))


@ranks
@shapes
@pytest.mark.parametrize("x_is_row_major", [False, True])
def test_bcast_to_another_array(group, shape, x_is_row_major):
    """Only the order of the output counts: root's input is copied there."""
    root, out = group.size - 1, channels_last(7, shape)
    x = fake_arrays.Array.of(values(group.rank, shape), fake_arrays.Stream())
    x = x if x_is_row_major else channels_last(group.rank, shape)
    assert group.bcast(x, root, out=out) is out
    np.testing.assert_array_equal(out.get(), values(root, shape))
    np.testing.assert_array_equal(x.get(), values(group.rank, shape))


@ranks
def test_same(group):
    shape = (2, 3, 4, 5)
    found = group.same({"x": channels_last(0, shape)})
    assert found != group.same({"x": channels_last(1, shape)})
    assert found == group.same({"x": channels_last(0, shape)})
    if group.size > 1:
        of_last = group.rank // (group.size - 1)
        with pytest.raises(ss.MismatchError, match=r"leaf \['x'\]"):
            group.same({"x": channels_last(of_last, shape)})
        row_major = fake_arrays.Array.of(values(0, shape), fake_arrays.Stream())
        with pytest.raises(ss.MismatchError, match=r"axes \(0, 2, 3, 1\)"):
            group.same({"x": channels_last(0, shape) if of_last else row_major})


@ranks
def test_trees(group):
    """With leaves of both orders, of which some share a message."""

    def leaves():
        small = [channels_last(group.rank, shape) for shape in SHAPES]
        return [*small, fake_arrays.Array.of(values(group.rank, (3, 5)), fake_arrays.Stream())]

    of = [*SHAPES, (3, 5)]
    for got, shape in zip(group.allreduce_tree(leaves()), of, strict=True):
        np.testing.assert_array_equal(got.get(), total(group, shape))
    for got, shape in zip(ss.synchronize(group, leaves(), root=group.size - 1), of, strict=True):
        np.testing.assert_array_equal(got.get(), values(group.size - 1, shape))


@ranks
@shapes
@pytest.mark.parametrize("kind", KINDS, ids=["unknown library", "CuPy"])
def test_means(group, shape, kind, monkeypatch):
    """Results of libraries that make arrays in any order have the order of the input, others are row-major."""
    monkeypatch.setitem(sys.modules, "cupy", fake_arrays.cupy())

    def gradients(shard):
        """Whose mean over the four shards is whole."""
        x = 1 + 4 * shard * numbers
        of = {dtype: x.astype(dtype) for dtype in ("float32", "float16", "complex64", "int32")}
        return {dtype: kind.in_order(x, CHANNELS_LAST, fake_arrays.Stream()) for dtype, x in of.items()}

    numbers = np.arange(np.prod(shape)).reshape(shape) % 50
    accumulator = ss.Accumulator(group, shards=4)
    for shard in accumulator.indices:
        accumulator.add(gradients(shard), shard=shard, copy=shard % 2 == 0)
    for dtype, mean in accumulator.mean().items():
        np.testing.assert_array_equal(host(mean), (1 + 6 * numbers).astype(dtype))
        if kind is fake_arrays.ConvertingArray:
            assert _core.memory_order(mean) == _core.memory_order(gradients(0)[dtype])


@ranks
@shapes
def test_weighted_means_in_place(group, shape):
    x = channels_last(group.rank, shape)
    got = group.allreduce_gradients({"x": x}, weight=group.rank + 1.0)["x"]
    assert got is x
    weighted = [(r + 1) * values(r, shape) for r in range(group.size)]
    expected = sum(weighted[1:], weighted[0]) / np.float32(sum(range(1, group.size + 1)))
    np.testing.assert_array_equal(got.get(), expected)


@pytest.mark.ranks(2, 3, backends=WORLDS)
def test_a_mean_of_which_a_rank_has_no_shard(group, monkeypatch):
    """It learns the order from the others."""
    monkeypatch.setitem(sys.modules, "cupy", fake_arrays.cupy())
    accumulator = ss.Accumulator(group, shards=1)
    x = fake_arrays.ConvertingArray.in_order(values(0, (2, 3, 4, 5)), CHANNELS_LAST, fake_arrays.Stream())
    for shard in accumulator.indices:
        accumulator.add({"x": x}, shard=shard)
    mean = accumulator.mean()["x"]
    np.testing.assert_array_equal(mean.get(), values(0, (2, 3, 4, 5)))
    assert _core.memory_order(mean) == CHANNELS_LAST


@pytest.mark.ranks(2, 3, backends=WORLDS)
def test_means_of_different_orders_are_refused(group):
    shape = (2, 3, 4, 5)
    row_major = fake_arrays.Array.of(values(0, shape), fake_arrays.Stream())
    accumulator = ss.Accumulator(group)
    accumulator.add({"x": channels_last(0, shape)})
    with pytest.raises(InvalidArgumentError, match=r"leaf \['x'\] is float32 .* and was .* with axes"):
        accumulator.add({"x": row_major})
    accumulator = ss.Accumulator(group)
    accumulator.add({"x": row_major if group.rank == 0 else channels_last(0, shape)})
    with pytest.raises(ss.MismatchError, match=r"axes \(0, 2, 3, 1\)"):
        accumulator.mean()


def with_none(group, kind, shape):
    """A tree of which the last rank has no array, beside one that it has."""
    x = kind.in_order(values(group.rank, shape), CHANNELS_LAST, fake_arrays.Stream())
    y = fake_arrays.Array.of(values(group.rank, (3, 5)), fake_arrays.Stream())
    return {"x": None if group.rank == group.size - 1 else x, "y": y}


@pytest.mark.ranks(2, 3, backends=WORLDS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 4, 5), (3, 1, 2, 5), (20, 30, 30, 40)])
def test_none_counts_as_zeros_in_the_same_order(group, shape, monkeypatch):
    """Also of a large array, which is sent alone."""
    monkeypatch.setitem(sys.modules, "cupy", fake_arrays.cupy())
    got = group.allreduce_tree(with_none(group, fake_arrays.ConvertingArray, shape))
    expected = sum(values(r, shape) for r in range(group.size - 1))
    np.testing.assert_array_equal(got["x"].get(), expected)
    np.testing.assert_array_equal(got["y"].get(), total(group, (3, 5)))


@pytest.mark.ranks(2, 3, backends=WORLDS)
def test_none_beside_another_order_is_refused_where_the_library_is_not_asked_for_arrays(group):
    """By all ranks, so that the group can go on. One pixel is row-major, so that it is taken."""
    with pytest.raises(InvalidArgumentError, match=rf"leaf \['x'\] is None on rank {group.size - 1} and not"):
        group.allreduce_tree(with_none(group, fake_arrays.Array, (2, 3, 4, 5)))
    got = group.allreduce_tree(with_none(group, fake_arrays.Array, (2, 3, 1, 1)))["x"]
    np.testing.assert_array_equal(host(got), sum(values(r, (2, 3, 1, 1)) for r in range(group.size - 1)))


@pytest.mark.ranks(2, 3, backends=WORLDS)
@pytest.mark.parametrize("verb", ["allreduce", "bcast", "allreduce_tree"])
def test_ranks_whose_orders_differ_are_told_so(group, verb):
    """A group of their own, which takes no device arrays afterwards."""
    shape = (2, 3, 4, 5)
    stream, own = fake_arrays.Stream(), group.group(range(group.size))
    x = (
        fake_arrays.Array.of(values(0, shape), stream)
        if group.rank == 0
        else channels_last(group.rank, shape)
    )
    with pytest.raises(ss.MismatchError, match=r"axes \(0, 2, 3, 1\)"):
        getattr(own, verb)(x, timeout=30)


@ranks
def test_input_and_output_of_other_orders_are_refused(group):
    shape = (2, 3, 4, 5)
    out = fake_arrays.Array.of(values(0, shape), fake_arrays.Stream())
    for x, to in ((channels_last(0, shape), out), (out, channels_last(0, shape))):
        with pytest.raises(InvalidArgumentError, match="different orders"):
            group.allreduce(x, out=to)
    group.barrier()


@ranks
def test_what_needs_row_major_order_or_has_gaps_is_refused(group):
    x = channels_last(0, (group.size, 3, 4, 5))
    with pytest.raises(InvalidArgumentError, match="not row-major"):
        group.allgather(x)
    x.axes = (0, 1, 2, 3)
    x.shape = (group.size, 3, 4, 4)
    interface = {**x.__cuda_array_interface__, "strides": (240, 80, 20, 4)}
    gaps = type("Gaps", (), {"__cuda_array_interface__": interface})()
    for call in (group.allreduce, group.allreduce_tree):
        with pytest.raises(InvalidArgumentError, match="gaps"):
            call(gaps)
    group.barrier()

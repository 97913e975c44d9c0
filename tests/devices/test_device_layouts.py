"""Arrays in device memory that are dense but not row-major are taken as they lie, by operations on single elements."""

from __future__ import annotations

import sys

import fake_arrays
import numpy as np
import pytest
import samestep as ss
from samestep.errors import InvalidArgumentError

WORLDS = ["fakes", "staged-native"]
ranks = pytest.mark.ranks(1, 2, 3, backends=WORLDS)
CHANNELS_LAST = (0, 2, 3, 1)
SHAPES = [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 40, 999), (2, 3, 1, 1), (0, 3, 4, 5)]
shapes = pytest.mark.parametrize("shape", SHAPES)


def values(rank, shape):
    return (np.arange(np.prod(shape)) % 1000 * (rank + 1)).reshape(shape).astype("float32")


def channels_last(rank, shape):
    return fake_arrays.Array.in_order(values(rank, shape), CHANNELS_LAST, fake_arrays.Stream())


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
    got = got.get() if isinstance(got, fake_arrays.Array) else got.numpy()
    np.testing.assert_array_equal(got, sum(values(r, (2, 3, 1, 1)) for r in range(group.size - 1)))


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

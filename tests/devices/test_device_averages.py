"""Averages of 16-bit floats in device memory are computed in float32 and rounded once, as those of host arrays."""

from __future__ import annotations

import fake_arrays
import numpy as np
import pytest
import samestep as ss

ranks = pytest.mark.ranks(1, 2, 3, backends=["fakes"])
KINDS = {"converted by its library": fake_arrays.ConvertingArray, "unknown library": fake_arrays.Array}
kinds = pytest.mark.parametrize("kind", KINDS)


def values(rank, shape):
    """No average of the first ranks' is midway between two floats of 16 bits, where any error of float32 decides."""
    all_ranks = []
    for r in range(3):
        random = np.random.default_rng(r)
        all_ranks.append((random.standard_normal(shape) * 10 + 1).astype("float16"))
        mean = np.mean(all_ranks, axis=0, dtype="float64")
        nearest = mean.astype("float16")
        midway = abs(mean - nearest) > 0.499 * np.spacing(abs(nearest))
        for x in all_ranks:
            x[midway] = 1.0
    return all_ranks[rank]


def average_of(group, shape):
    """Exact up to the last rounding."""
    return np.mean([values(r, shape).astype("float64") for r in range(group.size)], axis=0).astype("float16")


@ranks
@kinds
def test_allreduce(group, kind):
    for count in (0, 1, 1023):
        x = KINDS[kind].of(values(group.rank, count), fake_arrays.Stream())
        assert group.allreduce(x, "avg") is x
        np.testing.assert_array_equal(x.get(), average_of(group, count))


@ranks
@kinds
def test_the_input_is_kept_where_there_is_an_output(group, kind):
    stream = fake_arrays.Stream()
    x, out = (KINDS[kind].of(values(group.rank, 77), stream) for _ in range(2))
    assert group.allreduce(x, "avg", out=out) is out
    np.testing.assert_array_equal(x.get(), values(group.rank, 77))
    np.testing.assert_array_equal(out.get(), average_of(group, 77))


@ranks
@kinds
def test_reduce(group, kind):
    root = group.size - 1
    x = KINDS[kind].of(values(group.rank, 77), fake_arrays.Stream())
    group.reduce(x, "avg", root=root)
    expected = average_of(group, 77) if group.rank == root else values(group.rank, 77)
    np.testing.assert_array_equal(x.get(), expected)


@ranks
@kinds
def test_reduce_scatter(group, kind):
    stream, shape = fake_arrays.Stream(), (group.size, 5)
    x, out = KINDS[kind].of(values(group.rank, shape), stream), KINDS[kind].of(np.zeros(5, "float16"), stream)
    assert group.reduce_scatter(x, "avg", out=out) is out
    np.testing.assert_array_equal(out.get(), average_of(group, shape)[group.rank])


@ranks
@kinds
def test_trees(group, kind):
    stream = fake_arrays.Stream()
    tree = [KINDS[kind].of(values(group.rank, n), stream) for n in (3, 0, 1000)]
    reduced = group.allreduce_tree(tree, "avg")
    for got, n in zip(reduced, (3, 0, 1000), strict=True):
        np.testing.assert_array_equal(got.get(), average_of(group, n))


@ranks
def test_a_work_that_says_it_is_done_has_rounded(group):
    x = fake_arrays.ConvertingArray.of(values(group.rank, 77), fake_arrays.Stream())
    work = group.iallreduce(x, "avg")
    while not work.done():
        pass
    assert work.exception() is None
    np.testing.assert_array_equal(x.get(), average_of(group, 77))
    assert work.wait() is x


@pytest.mark.ranks(2, backends=["fakes"])
def test_ranks_with_other_dtypes_are_told_so(group):
    """Though both are averaged in float32. A group of its own, which takes no device arrays afterwards."""
    own = group.group(range(group.size))
    dtype = "float16" if group.rank else "float32"
    x = fake_arrays.ConvertingArray.of(np.ones(5, dtype), fake_arrays.Stream())
    with pytest.raises(ss.MismatchError, match="float16"):
        own.allreduce(x, "avg", timeout=30)


@ranks
def test_what_its_library_converts_goes_through_nccl(group):
    stream = fake_arrays.Stream()
    rows = fake_arrays.ConvertingArray.of(values(group.rank, (group.size, 5)), stream)
    x = fake_arrays.ConvertingArray.of(values(group.rank, 5), stream)
    for call in (
        lambda: group.allreduce(x, "avg"),
        lambda: group.reduce(x, "avg"),
        lambda: group.reduce_scatter(rows, "avg", out=x),
        lambda: group.allreduce_tree({"x": x}, "avg"),
    ):
        before = fake_arrays.nccl_calls()
        call()
        assert fake_arrays.nccl_calls() == before + 1

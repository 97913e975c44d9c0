"""Operations in progress on the same device memory act in the order of the calls, through NCCL and the host."""

from __future__ import annotations

import sys

import fake_arrays
import numpy as np
import pytest
import samestep as ss

ranks = pytest.mark.ranks(1, 2, 3, backends=["fakes"])
KINDS = {"converted by its library": fake_arrays.ConvertingArray, "unknown library": fake_arrays.Array}
COUNTS = [1, 100_000]


def of_rank(kind, group, count, dtype):
    return KINDS[kind].of(np.full(count, 2.0 * (group.rank + 1), dtype), fake_arrays.Stream())


@ranks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_sum_behind_an_average(group, kind, count, dtype):
    x = of_rank(kind, group, count, dtype)
    first = group.iallreduce(x, "avg")
    second = group.iallreduce(x, "sum")
    second.wait(host=True)
    first.wait(host=True)
    np.testing.assert_array_equal(x.get(), np.full(count, (group.size + 1) * group.size, dtype))


@ranks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
def test_of_two_groups(group, kind, count):
    other = group.split(0)
    x = of_rank(kind, group, count, "float32")
    works = [group.iallreduce(x), other.iallreduce(x), group.ibcast(x, root=group.size - 1)]
    for work in reversed(works):
        work.wait(host=True)
    np.testing.assert_array_equal(x.get(), np.full(count, (group.size + 1) * group.size**2, "float32"))
    other.close()


@pytest.mark.ranks(1, 2, 3, backends=["fakes", "staged-native"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("copy", [True, False])
def test_an_accumulator_adds_what_is_on_its_way(group, kind, count, copy, monkeypatch):
    """Arrays of some libraries have `__cuda_array_interface__` alone, without DLPack."""
    monkeypatch.setitem(sys.modules, "cupy", fake_arrays.cupy())
    x, mean = of_rank(kind, group, count, "float32"), ss.Accumulator(group)
    work = group.iallreduce(x)
    mean.add({"x": x}, copy=copy)
    found = mean.mean()["x"]
    work.wait(host=True)
    found = found.get() if isinstance(found, fake_arrays.Array) else found.numpy()
    np.testing.assert_array_equal(found, np.full(count, (group.size + 1) * group.size, "float32"))

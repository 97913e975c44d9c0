"""Operations in progress on the same device memory act in the order of the calls, through NCCL and the host."""

from __future__ import annotations

import fake_arrays
import numpy as np
import pytest

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

"""Sums with a factor and averages, of lengths that NCCL's kernel for one rank divides with a remainder.

In NCCL 2.28.9 that kernel leaves out up to as many elements as it has blocks (the stand-in, too).
"""

from __future__ import annotations

import fake_arrays
import numpy as np
import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(1, 2, backends=["fakes"])
COUNTS = (0, 1, 4095, 4097, 70_001, 131_077, 300_005)  # of float32: up to 16 KiB, some blocks, all 32 of them
DTYPES = ("float32", "float64", "complex64")


def values(rank, count, dtype):
    """Multiples of a power of two, for factors and averages without rounding."""
    return ((np.arange(count) % 100 + rank) * 8).astype(dtype)


def on_device(x):
    return fake_arrays.Array.of(x, fake_arrays.Stream())


def expected(group, count, dtype, factor):
    return sum(values(r, count, dtype) for r in range(group.size)) * np.dtype(dtype).type(factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [ss.premul(0.25), ss.AVG], ids=["premul", "avg"])
def test_every_element_is_multiplied(group, dtype, op):
    factor = 0.25 if op != ss.AVG else 1 / group.size
    for count in COUNTS:
        mine, sums = values(group.rank, count, dtype), expected(group, count, dtype, factor)
        x = on_device(mine)
        group.allreduce(x, op)
        np.testing.assert_array_equal(x.get(), sums)
        x, out = on_device(mine), on_device(np.full(count, 7, dtype))
        group.allreduce(x, op, out=out)
        np.testing.assert_array_equal(out.get(), sums)
        group.reduce(x, op, root=group.size - 1)
        np.testing.assert_array_equal(x.get(), sums if group.rank == group.size - 1 else mine)
        rows = on_device(np.stack([values(group.rank + k, count, dtype) for k in range(group.size)]))
        group.reduce_scatter(rows, op, out=out)
        shifted = sum(values(r + group.rank, count, dtype) for r in range(group.size))
        np.testing.assert_array_equal(out.get(), shifted * np.dtype(dtype).type(factor))


def test_every_element_of_a_tree_is_averaged(group):
    tree = [on_device(values(group.rank, count, "float32")) for count in COUNTS]
    for got, count in zip(group.allreduce_tree(tree, "avg"), COUNTS, strict=True):
        np.testing.assert_array_equal(got.get(), expected(group, count, "float32", 1 / group.size))

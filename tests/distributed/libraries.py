"""Arrays of each library, and exact values to put into them."""

import sys

import numpy as np
import pytest

WRITABLE = ["numpy", "torch"]
ALL = [*WRITABLE, "jax", "read-only"]
SHAPES = [(0,), (), (1,), (2,), (5,), (2, 3), (3, 0, 2), (1009,)]


def make(library, values):
    """`values` as an array of `library`, which shares no memory with it. Skips the test where `library` is missing."""
    if library == "torch":
        torch = pytest.importorskip("torch")
        return torch.from_numpy(np.array(values))
    if library == "jax":
        jnp = pytest.importorskip("jax.numpy")
        return jnp.asarray(values)
    array = np.array(values)
    array.flags.writeable = library != "read-only"
    return array


def contribution(rank, shape, dtype="f4"):
    """Small integers that distinguish ranks and positions."""
    size = int(np.prod(shape, dtype=int))
    return (np.arange(size) % 17 + 100 * (rank + 1)).astype(dtype).reshape(shape)


def is_same_kind(x, library):
    """Whether `x` is an array of that library."""
    if library == "torch":
        return isinstance(x, sys.modules["torch"].Tensor)
    if library == "jax":
        return isinstance(x, sys.modules["jax"].Array)
    return isinstance(x, np.ndarray)


def outcome(returned, given, library):
    """What a collective left or returned: by the rule, `given` itself where it can be written, else a new array."""
    if library in WRITABLE:
        assert returned is None
        return np.asarray(given)
    assert is_same_kind(returned, library)
    return np.asarray(returned)


def assert_same(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got, expected)

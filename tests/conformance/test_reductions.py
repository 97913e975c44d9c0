"""allreduce, reduce, reduce_scatter: every operator on every dtype, bit for bit, the same on all ranks."""

import operator

import numpy as np
import pytest
import samestep as ss
from reference import (
    BIG_SIZE,
    COMPLEX,
    DTYPES,
    FLOATS,
    INTEGERS,
    SMALL_SIZES,
    assert_same,
    assert_same_everywhere,
    ops_for,
    reduced,
    values,
)

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def inputs_of(group, shape, name, seed=0):
    return [values(rank, shape, name, seed=seed) for rank in range(group.size)]


@pytest.mark.parametrize("name", DTYPES)
def test_allreduce(group, name):
    for op in ops_for(name):
        for count in SMALL_SIZES:
            inputs = inputs_of(group, count, name, seed=count)
            x = inputs[group.rank].copy()
            assert group.allreduce(x, op) is x
            assert_same(x, reduced(inputs, op), f"{op} of {count}")


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "int64", "uint8", "complex64"])
def test_allreduce_of_many_elements(group, name):
    inputs = inputs_of(group, BIG_SIZE, name)
    x = inputs[group.rank].copy()
    group.allreduce(x)
    assert_same(x, reduced(inputs, "sum"))
    assert_same_everywhere(group, x)


@pytest.mark.parametrize("count", [1000, 4096, 8192, 8193, 16 * 1024, 64 * 1024 - 1, 64 * 1024, 300_000])
def test_allreduce_at_sizes_where_paths_change(group, count):
    inputs = inputs_of(group, count, "float32", seed=count)
    x = inputs[group.rank].copy()
    group.allreduce(x)
    assert_same(x, reduced(inputs, "sum"))


@pytest.mark.parametrize("name", DTYPES)
def test_reduce_at_every_root(group, name):
    for op in ops_for(name):
        for root in range(group.size):
            inputs = inputs_of(group, 5, name, seed=root)
            x = inputs[group.rank].copy()
            group.reduce(x, op, root=root)
            expected = reduced(inputs, op) if group.rank == root else inputs[group.rank]
            assert_same(x, expected, f"{op} at root {root}")


@pytest.mark.parametrize("name", DTYPES)
def test_reduce_scatter(group, name):
    for op in ops_for(name):
        for count in SMALL_SIZES:
            inputs = inputs_of(group, (group.size, count), name, seed=count)
            x = inputs[group.rank].copy()
            got = group.reduce_scatter(x, op)
            assert_same(got, reduced(inputs, op)[group.rank], f"{op} of {count}")
            assert_same(x, inputs[group.rank], "the input")


def test_reductions_of_many_elements(group):
    inputs = inputs_of(group, (group.size, BIG_SIZE // group.size), "float32")
    x = inputs[group.rank].copy()
    assert_same(group.reduce_scatter(x), reduced(inputs, "sum")[group.rank])
    root = group.size - 1
    group.reduce(x, root=root)
    assert_same(x, reduced(inputs, "sum") if group.rank == root else inputs[group.rank])


@pytest.mark.parametrize("shape", [(), (1,), (3, 0, 2), (2, 3, 4), (1, 1, 1, 1, 5)])
def test_any_shape(group, shape):
    inputs = inputs_of(group, shape, "float64")
    x = inputs[group.rank].copy()
    assert group.allreduce(x) is x
    assert_same(x, reduced(inputs, "sum"))


# ---- operators


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (ss.SUM, "sum"),
        (ss.PROD, "prod"),
        (ss.MIN, "min"),
        (ss.MAX, "max"),
        (ss.AVG, "avg"),
        (ss.avg, "avg"),
        (operator.add, "sum"),
        (operator.mul, "prod"),
        (min, "min"),
        (max, "max"),
    ],
)
def test_the_ways_to_write_an_operator(group, op, name):
    inputs = inputs_of(group, 5, "float32")
    assert_same(group.allreduce(inputs[group.rank].copy(), op), reduced(inputs, name))


def test_the_bitwise_operators_of_the_enum(group):
    inputs = inputs_of(group, 5, "int32")
    for op in (ss.BAND, ss.BOR, ss.BXOR, ss.LAND, ss.LOR):
        assert_same(group.allreduce(inputs[group.rank].copy(), op), reduced(inputs, op.name.lower()), op.name)


@pytest.mark.parametrize("name", [*FLOATS, *COMPLEX])
def test_premul_with_a_factor_of_each_rank(group, name):
    factors = [0.5 + rank / 3 for rank in range(group.size)]
    inputs = inputs_of(group, 37, name)
    x = inputs[group.rank].copy()
    group.allreduce(x, ss.premul(factors[group.rank]))
    assert_same(x, reduced(inputs, "premul", factors))


@pytest.mark.parametrize("name", ["int32", "int64", "uint8"])
def test_premul_of_integers_by_whole_numbers(group, name):
    factors = [rank + 2 for rank in range(group.size)]
    inputs = inputs_of(group, 37, name)
    x = inputs[group.rank].copy()
    group.allreduce(x, ss.premul(factors[group.rank]))
    assert_same(x, reduced(inputs, "premul", factors))


def test_premul_of_integers_is_exact_or_refused(group):
    for exact in (2**53, -(2**53), 2**60, np.int64(2**62), np.uint64(2**53 - 1)):
        got = group.allreduce(np.ones(1, np.int64), ss.premul(exact if group.rank == 0 else 0))
        assert got[0] == int(exact)
    for inexact in (2**53 + 1, np.int64(2**60 + 1), -(2**53) - 1, 10**400):
        with pytest.raises(
            ss.InvalidArgumentError, match=r"premul: an integer must be equal to a float64.*SUM"
        ):
            ss.premul(inexact)


@pytest.mark.parametrize("name", INTEGERS)
def test_the_average_of_equal_integers_is_that_integer(group, name):
    limits = np.iinfo(name)
    x = np.array([limits.min, 0, 1, limits.max], name)
    expected = x.copy()
    assert_same(group.allreduce(x, "avg"), expected)


def test_the_average_of_negative_integers_is_rounded_down(group):
    x = np.array([-1 if group.rank == 0 else 0], "int32")
    group.allreduce(x, "avg")
    assert x[0] == -1


def test_min_and_max_propagate_nan(group):
    for name in ("float16", "float32", "float64"):
        for op in ("min", "max"):
            x = np.array([group.rank, np.nan if group.rank == group.size - 1 else 1], name)
            group.allreduce(x, op)
            assert not np.isnan(x[0])
            assert np.isnan(x[1]), f"{op} of {name}"


def test_float16_is_summed_in_float32_and_rounded_once(group):
    x = np.full(3, 2049 if group.rank == 0 else 1, "float32").astype("float16")  # 2048, the next is 2050
    group.allreduce(x)
    assert x[0] == np.float16(np.float32(2048) + np.float32(group.size - 1))


def test_infinities_and_signed_zeros(group):
    x = np.array([np.inf, -np.inf, -0.0, np.inf if group.rank == 0 else -np.inf])
    group.allreduce(x)
    assert x[0] == np.inf
    assert x[1] == -np.inf
    assert np.signbit(x[2])
    assert x[3] == np.inf if group.size == 1 else np.isnan(x[3])


def test_the_same_bits_in_every_run_and_on_every_rank(group):
    runs = []
    for _ in range(5):
        x = values(group.rank, 10_007, "float32")
        group.allreduce(x)
        assert_same_everywhere(group, x)
        runs.append(x.tobytes())
    assert len(set(runs)) == 1


def test_the_bits_do_not_depend_on_how_a_buffer_is_cut(group):
    whole = values(group.rank, 50_021, "float32")
    parts = whole.copy()
    group.allreduce(whole)
    for start, stop in [(0, 1), (1, 8), (8, 4099), (4099, 50_021)]:
        group.allreduce(parts[start:stop])
    assert_same(parts, whole)


@pytest.mark.parametrize("x", [2**63 - 1, -(2**63), 2**64 - 1])
def test_a_mean_of_ints_fits_as_they_do(group, x):
    assert group.allreduce(x, "avg") == x
    assert group.allreduce_tree({"n": x}, "avg") == {"n": x}


@pytest.mark.parametrize("verb", ["allreduce", "reduce"])
@pytest.mark.parametrize(
    ("x", "op"), [(2**63 - 1, "sum"), (-(2**63), "sum"), (2**62, "prod"), (2**40, ss.premul(2**23))], ids=str
)
def test_an_int_of_python_does_not_wrap_around(group, verb, x, op):
    """Refused on all ranks, if one has it; what fits is exact."""
    if group.size == 1:
        assert getattr(group, verb)(2**62, "sum") == 2**62
        return
    with pytest.raises(ss.Error, match=r"too large to add up or multiply"):
        getattr(group, verb)(x if group.rank == group.size - 1 else 1, op)
    assert group.allreduce(2**60) == 2**60 * group.size
    assert group.allreduce(2**63 - 1, "max") == 2**63 - 1
    assert group.allreduce(2**63 - 1, "avg") == 2**63 - 1

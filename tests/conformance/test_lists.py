"""The numbers of collectives on lists of NumPy arrays, several on each rank."""

import numpy as np
import pytest
import samestep as ss
import samestep.distributed as dist
from reference import COMPLEX, FLOATS, INTEGERS, assert_same, assert_same_everywhere, dtype

pytestmark = pytest.mark.ranks(1, 2, 3)

LENGTHS = [1, 2, 3]
SHAPES = [(0,), (1,), (5,), (2, 3), (1009,)]


def allreduce(arrays, op="sum"):
    arrays = list(arrays)
    dist.all_reduce_multigpu(arrays, op)
    return arrays


def reduce(arrays, op="sum", *, root=0, root_array=0):
    arrays = list(arrays)
    dist.reduce_multigpu(arrays, root, op, dst_tensor=root_array)
    return arrays


def bcast(arrays, *, root=0, root_array=0):
    arrays = list(arrays)
    dist.broadcast_multigpu(arrays, root, src_tensor=root_array)
    return arrays


def part(rank, j, shape, dtype="f4"):
    """Small integers that distinguish ranks, arrays and positions."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 + 10 * rank + 3 * j).astype(dtype)


def mine(group, length, shape, dtype="f4"):
    return [part(group.rank, j, shape, dtype) for j in range(length)]


def gathered(group, length, shape, dtype="f4"):
    return [part(r, j, shape, dtype) for r in range(group.size) for j in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_allreduce_sums_over_all_arrays(group, length, shape):
    given = mine(group, length, shape)
    got = allreduce(given)
    assert isinstance(got, list)
    for x, y in zip(got, given, strict=True):
        assert x is y
        assert_same(x, np.asarray(sum(gathered(group, length, shape)), "f4"))


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        ("avg", "u1", 249),
        ("avg", "i8", 249),
        ("avg", "f4", 249),
        ("max", "i4", 250),
        ("min", "f8", 248),
        ("bor", "u1", 250 | 249 | 248),
        ("land", "u1", 1),
    ],
)
def test_operators(group, op, dtype, expected):
    for x in allreduce([np.full(4, 248 + j, dtype) for j in range(3)], op):
        assert_same(x, np.full(4, expected, dtype))


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "max", ss.premul(3)])
@pytest.mark.parametrize("name", ["int32", "float16", "float64", "complex64"])
@pytest.mark.parametrize("n", [0, 1, 1009, 300_000])
def test_arrays_may_lie_differently_on_each_rank(group, op, name, n):
    """Some ranks combine their arrays where they lie, others copies; ranks still agree in every bit."""
    if op == "max" and name in COMPLEX:
        return
    rows = [part(group.rank, j, (n,), name) for j in range(3)]
    with_gaps = [np.stack([row, row], 1)[:, 0] for row in rows]
    plain = allreduce([row.copy() for row in rows], op)
    mixed = allreduce(with_gaps if group.rank else rows, op)
    for x in [*plain, *mixed]:
        assert_same(np.array(x), np.array(plain[0]))
    assert_same_everywhere(group, np.array(plain[0]))


def test_factors_are_those_of_each_rank(group):
    got = allreduce([np.ones(3, "f8"), np.ones(3, "f8")], ss.premul(group.rank + 1.0))
    for x in got:
        assert_same(x, np.full(3, float(group.size * (group.size + 1))))


HIGHEST = {"float16": 2.0**15, "float64": 2.0**1023, "complex128": 2.0**1023}  # powers of two
EDGES = {
    "i8": [-(2**63), 2**63 - 1, 2**62, -1, 0],
    "u8": [2**64 - 1, 2**63, 1, 0, 7],
    "i4": [-(2**31), 2**31 - 1, -1, 2, 0],
    "i1": [-128, 127, -1, 3, 0],
    "u1": [255, 254, 1, 0, 128],
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("length", LENGTHS)
def test_averages_of_integers_are_exact(group, name, length):
    edges = EDGES[name]
    n = group.size * length
    columns = [[edges[i]] * n for i in range(5)] + [[edges[(i + k) % 5] for k in range(n)] for i in range(5)]
    rows = np.array(columns, name).T[group.rank * length :]
    expected = np.array([sum(column) // n for column in columns], name)
    for x in allreduce([rows[j].copy() for j in range(length)], "avg"):
        assert_same(x, expected)
    root = group.size - 1
    got = reduce([rows[j].copy() for j in range(length)], "avg", root=root)
    assert_same(got[0], expected if group.rank == root else rows[0])


@pytest.mark.parametrize("name", [*FLOATS, *COMPLEX])
def test_factors_are_those_of_each_array(group, name):
    """What a factor brings into range has not left it before; the parts of complex numbers do not touch."""
    values = np.array([HIGHEST.get(name, 2.0**127), np.inf, 3.0])
    x = values.astype(dtype(name))
    for got in allreduce([x.copy(), x.copy()], ss.premul(0.125)):
        assert_same(got, (values * (0.125 * 2 * group.size)).astype(x.dtype))


@pytest.mark.parametrize("name", INTEGERS)
def test_factors_of_integers_wrap(group, name):
    x = np.arange(1, 60).astype(name)
    for got in allreduce([x.copy(), x.copy()], ss.premul(-3)):
        assert_same(got, (np.arange(1, 60) * (-6 * group.size)).astype(name))


@pytest.mark.parametrize("length", LENGTHS)
def test_reduce_writes_one_array_of_root(group, length):
    root, place = group.size - 1, length - 1
    given = mine(group, length, (2, 3))
    got = reduce(given, root=root, root_array=place)
    total = np.asarray(sum(gathered(group, length, (2, 3))), "f4")
    for j, x in enumerate(got):
        assert x is given[j]
        assert_same(x, total if (group.rank, j) == (root, place) else part(group.rank, j, (2, 3)))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bcast_fills_all_arrays(group, length, shape):
    root, place = group.size - 1, length // 2
    for x in bcast(mine(group, length, shape), root=root, root_array=place):
        assert_same(x, part(root, place, shape))


def test_arrays_that_cannot_be_written_are_replaced(group):
    given = mine(group, 2, (5,))
    given[1].flags.writeable = False
    total = np.asarray(sum(gathered(group, 2, (5,))), "f4")
    got = allreduce(given)
    assert got[0] is given[0]
    assert got[1] is not given[1]
    for x in got:
        assert_same(x, total)
    assert_same(given[1], part(group.rank, 1, (5,)))


CHUNK = 128 << 10  # bytes of each array that are treated at a time


def with_gaps(x, name):
    """A copy, every second element of longer memory."""
    spread = np.zeros(2 * x.size, dtype(name))[::2]
    spread[:] = x
    return spread


@pytest.mark.parametrize("n_more", [-1, 0, 1, CHUNK])
@pytest.mark.parametrize(
    ("name", "op"), [("int8", "avg"), ("float16", "sum"), ("bfloat16", "max"), ("uint8", "land")]
)
def test_arrays_of_several_chunks(group, n_more, name, op):
    """Of odd lengths, some with gaps and some that cannot be written."""
    n = CHUNK // dtype(name).itemsize + n_more
    everybodys = [(np.arange(n) % 61 + r - j) % 50 for r in range(group.size) for j in range(3)]
    given = [x.astype(dtype(name)) for x in everybodys[group.rank * 3 :][:3]]
    given[1] = with_gaps(given[1], name)
    given[2].flags.writeable = False
    before = given[2].copy()
    stacked = np.array(everybodys)
    expected = {
        "avg": stacked.sum(0) // len(stacked),
        "sum": stacked.sum(0),
        "max": stacked.max(0),
        "land": stacked.all(0),
    }[op].astype(dtype(name))
    got = allreduce(given, op)
    assert got[0] is given[0] and got[1] is given[1] and got[2] is not given[2]
    for x in got:
        assert_same(np.ascontiguousarray(x), expected)
    assert_same(given[2], before)


def refused(group, call, *named):
    with pytest.raises(ss.MismatchError) as caught:
        call()
    for name in named:
        assert name in str(caught.value), caught.value
    assert_same(group.allreduce(np.ones(3)), np.full(3, float(group.size)))


@pytest.mark.ranks(2, 3)
def test_ranks_that_differ_are_told_on_all_of_them(group):
    odd = group.rank == group.size - 1
    two, some = mine(group, 2, (4,)), mine(group, 1 + odd, (4,))
    refused(group, lambda: allreduce(some), ": all_reduce_multigpu of 2 arrays of float32[4]")
    refused(group, lambda: bcast(some), ": broadcast_multigpu of 2 arrays")
    refused(group, lambda: reduce(some), ": reduce_multigpu of 2 arrays")
    refused(group, lambda: bcast(two, root_array=int(odd)), "array 1 of root 0")
    refused(group, lambda: reduce(two, root_array=int(odd)), "array 1 of root 0")
    refused(group, lambda: bcast(two, root=int(odd)), "root 1")
    verb = bcast if odd else allreduce
    refused(group, lambda: verb(two), ": broadcast_multigpu of 2", ": all_reduce_multigpu of 2")
    refused(group, lambda: allreduce(two, "max" if odd else "sum"), "max", "sum")
    refused(group, lambda: allreduce(mine(group, 2, (4 + odd,))), "float32")
    refused(group, lambda: allreduce(mine(group, 2, (4,), "f8" if odd else "f4")), "float64")
    for j, x in enumerate(two):
        assert_same(x, part(group.rank, j, (4,)))


HIDDEN = {  # calls that the reduction of the ranks' lists does not distinguish, or that hide for another reason
    "operators": (("float32", "avg"), ("float32", "sum")),
    "operators on integers": (("int32", "avg"), ("int32", "sum")),
    "half types and their sums": (("float16", "sum"), ("float32", "sum")),
    "half types": (("float16", "sum"), ("bfloat16", "sum")),
    "integers that are averaged": (("int32", "avg"), ("int64", "avg")),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", HIDDEN)
@pytest.mark.parametrize("verb", [allreduce, reduce])
@pytest.mark.parametrize("odd", [0, -1], ids=["first", "last"])
def test_ranks_that_differ_in_what_a_reduction_hides(group, what, verb, odd):
    of_odd, of_others = HIDDEN[what]
    name, op = of_odd if group.rank == odd % group.size else of_others
    given = mine(group, 2, (4,), dtype(name))
    refused(group, lambda: verb(given, op), *(set(of_odd) ^ set(of_others)))
    for j, x in enumerate(given):
        assert_same(x, part(group.rank, j, (4,), dtype(name)))

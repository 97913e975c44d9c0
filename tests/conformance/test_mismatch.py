"""Ranks that disagree: the same MismatchError on every rank, nothing written, the group stays usable."""

import numpy as np
import pytest
import samestep as ss
from reference import assert_same

pytestmark = pytest.mark.ranks(2, 3)


@pytest.fixture(params=["first", "last"])
def odd_one(request, group):
    """The rank that differs."""
    return 0 if request.param == "first" else group.size - 1


def refuse(group, call, *named):
    """`call` raises the same MismatchError on all ranks, naming these; the group is usable after."""
    with pytest.raises(ss.MismatchError) as caught:
        call()
    text = str(caught.value)
    assert len(set(group.allgather_object(text))) == 1, f"rank {group.rank}: {text}"
    for name in named:
        assert name in text, f"{name!r} is not in {text!r}"
    x = np.ones(3)
    group.allreduce(x)
    assert_same(x, np.full(3, float(group.size)))


SHAPES = [
    ((3,), (4,)),
    ((0,), (1,)),
    ((2, 3), (3, 2)),
    ((3,), (3, 1)),
    ((), (1,)),
    ((2,), (300_000,)),
    ((90_000,), (90_001,)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_shapes(group, odd_one, shapes):
    usual, odd = shapes
    shape = odd if group.rank == odd_one else usual
    x = np.full(shape, 1.0)
    reported = [f"float64{list(shape)}" for shape in shapes]
    refuse(group, lambda: group.allreduce(x), "allreduce", *reported, f"rank {odd_one}")
    assert_same(x, np.full(shape, 1.0))


@pytest.mark.parametrize(("usual", "odd"), [("float32", "int32"), ("float64", "float32"), ("int8", "bool")])
@pytest.mark.parametrize("count", [2, 50_000])
def test_dtypes(group, odd_one, usual, odd, count):
    x = np.ones(count, odd if group.rank == odd_one else usual)
    before = x.copy()
    refuse(group, lambda: group.allreduce(x), "allreduce", usual, odd, f"rank {odd_one}")
    assert_same(x, before)


@pytest.mark.parametrize(("usual", "odd"), [("sum", "max"), ("avg", "sum")])
@pytest.mark.parametrize("count", [1, 50_000])
def test_ops(group, odd_one, usual, odd, count):
    x = np.ones(count)
    refuse(
        group, lambda: group.allreduce(x, odd if group.rank == odd_one else usual), "allreduce", usual, odd
    )
    assert_same(x, np.ones(count))


@pytest.mark.parametrize("verb", ["bcast", "reduce", "gather", "scatter"])
def test_roots(group, odd_one, verb):
    if group.size == 2 and verb == "scatter":
        call = lambda: group.scatter(np.ones((2, 1)), root=int(group.rank == odd_one))  # noqa: E731
    else:
        root = 1 if group.rank == odd_one else 0
        x = np.ones((group.size, 2))
        given = None if verb == "scatter" and group.rank != root else x
        call = lambda: getattr(group, verb)(given, root=root)  # noqa: E731
    refuse(group, call, "root")


@pytest.mark.parametrize("other", ["barrier", "bcast", "allgather", "reduce"])
def test_verbs(group, odd_one, other):
    x = np.ones(3)
    args = () if other == "barrier" else (x,)
    call = getattr(group, other) if group.rank == odd_one else group.allreduce
    refuse(group, lambda: call(*(args if group.rank == odd_one else (x,))), "allreduce", other)
    assert_same(x, np.ones(3))


@pytest.mark.parametrize("verb", ["allgather", "reduce_scatter", "alltoall", "bcast", "reduce", "gather"])
def test_shapes_in_every_verb(group, odd_one, verb):
    x = np.ones((group.size, 3 if group.rank == odd_one else 2))
    before = x.copy()
    refuse(group, lambda: getattr(group, verb)(x), verb)
    assert_same(x, before)


def test_an_out_that_does_not_fit_what_is_scattered(group, odd_one):
    x = np.ones((group.size, 2)) if group.rank == 0 else None
    out = np.zeros(3 if group.rank == odd_one else 2)
    with pytest.raises((ss.MismatchError, ss.InvalidArgumentError), match="scatter"):
        group.scatter(x, out=out, timeout=10)
    assert not out.any()
    assert group.allreduce(1) == group.size


@pytest.mark.parametrize("verb", ["allgatherv", "gatherv"])
def test_rows_that_do_not_fit_together(group, odd_one, verb):
    x = np.ones((2, 3 if group.rank == odd_one else 4))
    refuse(group, lambda: getattr(group, verb)(x), verb)


def test_dtypes_in_ragged_verbs(group, odd_one):
    x = np.ones((2, 3), "f4" if group.rank == odd_one else "f8")
    refuse(group, lambda: group.allgatherv(x), "float32", "float64")
    counts = [2] + [0] * (group.size - 1)
    refuse(group, lambda: group.alltoallv(x, counts), "float32", "float64")


def test_only_the_operation_in_question_fails(group, odd_one):
    good = [np.ones(10), np.ones(20_000)]
    before = group.iallreduce(good[0])
    bad = group.iallreduce(np.ones(3 if group.rank == odd_one else 2))
    after = group.iallreduce(good[1])
    after.wait()
    with pytest.raises(ss.MismatchError):
        bad.wait()
    assert isinstance(bad.exception(), ss.MismatchError)
    before.wait()
    for x in good:
        assert_same(x, np.full(x.shape, float(group.size)))


def test_many_in_a_row(group, odd_one):
    for i in range(20):
        refuse(group, lambda i=i: group.allreduce(np.ones(i + (group.rank == odd_one))), "allreduce")


def test_every_rank_differs(group):
    refuse(group, lambda: group.allreduce(np.ones(group.rank)), *[f"float64[{r}]" for r in range(group.size)])
    verbs = [group.allreduce, group.bcast, group.allgather, group.reduce]
    refuse(group, lambda: verbs[group.rank](np.ones(2)), "allreduce", "bcast")


def test_in_a_group(group, odd_one):
    part = group.split(0)
    x = np.ones(3 if group.rank == odd_one else 2)
    refuse(part, lambda: part.allreduce(x), part.name)
    assert group.allreduce(1) == group.size

"""Mistakes of the caller: each has its own clear error, nothing has happened, the group is usable after."""

import numpy as np
import pytest
import samestep as ss
from foreign_arrays import Versioned
from reference import COMPLEX, FLOAT8, FLOATS, assert_same, dtype

pytestmark = pytest.mark.ranks(1, 2)


@pytest.fixture(autouse=True)
def usable_after(group):
    yield
    if group.closed:  # the test has failed, and the plugin has notified the peers
        return
    x = np.full(4, group.rank + 1.0)
    group.allreduce(x, timeout=10)
    assert_same(x, np.full(4, group.size * (group.size + 1) / 2))


def array_verbs(group):
    """Every verb that takes an array, as a function of the array."""
    n = group.size
    return {
        "allreduce": group.allreduce,
        "reduce": group.reduce,
        "bcast": group.bcast,
        "allgather": group.allgather,
        "allgatherv": group.allgatherv,
        "gather": group.gather,
        "gatherv": group.gatherv,
        "reduce_scatter": group.reduce_scatter,
        "alltoall": group.alltoall,
        "alltoallv": lambda x: group.alltoallv(x, [1] * n),
        "send": lambda x: group.send(x, (group.rank + 1) % n),
        "recv": group.recv,
    }


NO_ARRAYS = [None, [1.0, 2.0], (1, 2), "text", b"bytes", {"a": 1}, object(), np.float64]


@pytest.mark.parametrize("x", NO_ARRAYS, ids=lambda x: type(x).__name__)
def test_what_is_no_array(group, x):
    for verb, call in array_verbs(group).items():
        with pytest.raises(TypeError) as caught:
            call(x)
        assert type(x).__name__ in str(caught.value), f"{verb}: {caught.value}"


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError])
def test_what_is_raised_while_an_array_is_read_and_is_not_about_it(group, raised):
    """Ctrl-C while JAX waits for an array is raised once: the next attempt would find the array ready."""

    class Interrupted(Versioned):
        asked = 0

        def __dlpack__(self, **options):
            self.asked += 1
            if self.asked == 1:
                raise raised
            return super().__dlpack__(**options)

    for verb, call in array_verbs(group).items():
        x = Interrupted()
        with pytest.raises(raised):
            call(x)
        assert x.asked == 1, verb


UNSUPPORTED = [
    np.array([None]),
    np.array(["text"]),
    np.array([b"bytes"]),
    np.zeros(2, "datetime64[s]"),
    np.zeros(2, [("a", "f4")]),
    np.zeros(2, "longdouble"),
    np.zeros(2, "clongdouble"),
    np.zeros(2, ">f4"),
]


@pytest.mark.parametrize("x", UNSUPPORTED, ids=lambda x: str(x.dtype))
def test_unsupported_dtypes(group, x):
    for verb, call in array_verbs(group).items():
        with pytest.raises((ss.InvalidArgumentError, TypeError)) as caught:
            call(np.array([x[:1]] * group.size, x.dtype))
        assert str(caught.value), verb


OPS_THAT_DO_NOT_FIT = [
    *[("min", name) for name in COMPLEX],
    *[("max", name) for name in COMPLEX],
    *[(op, name) for op in ("band", "bor", "bxor", "land", "lor") for name in [*FLOATS, *COMPLEX]],
    *[("sum", name) for name in FLOAT8],
    ("avg", "bool"),
]


@pytest.mark.parametrize(("op", "name"), OPS_THAT_DO_NOT_FIT)
def test_an_operator_that_does_not_fit_the_dtype(group, op, name):
    x = np.ones((group.size, 2), dtype(name))
    before = x.copy()
    for call in (group.allreduce, group.reduce, group.reduce_scatter, group.iallreduce):
        with pytest.raises(ss.InvalidArgumentError) as caught:
            call(x, op)
        assert op in str(caught.value)
        assert name in str(caught.value)
    assert_same(x, before)


@pytest.mark.parametrize("op", ["plus", "SUM ", "", 7, None, [], np.add, abs])
def test_unknown_operators(group, op):
    for call in (group.allreduce, group.reduce, group.reduce_scatter):
        with pytest.raises(ss.InvalidArgumentError, match="sum, prod"):
            call(np.ones((group.size, 2)), op)


def test_premul_that_does_not_fit(group):
    with pytest.raises(ss.InvalidArgumentError, match=r"0\.5"):
        group.allreduce(np.ones(2, "int32"), ss.premul(0.5))
    with pytest.raises(ss.InvalidArgumentError, match="factor"):
        ss.premul("x")


@pytest.mark.parametrize("verb", ["bcast", "reduce", "gather", "scatter", "gatherv", "scatterv"])
def test_a_root_outside_the_group(group, verb):
    x = np.ones((group.size, 2))
    for root in (-1, group.size, 10**6):
        with pytest.raises(ss.InvalidArgumentError, match=f"root.*{root}"):
            getattr(group, verb)(x, root=root)
    assert_same(x, np.ones((group.size, 2)))


@pytest.mark.parametrize("verb", ["bcast_object", "gather_object", "scatter_object"])
def test_a_root_outside_the_group_for_objects(group, verb):
    with pytest.raises(ss.InvalidArgumentError, match=f"root.*{group.size}"):
        getattr(group, verb)([1] * group.size, root=group.size)


@pytest.mark.parametrize("peer", ["-2", "size", "100"])
def test_a_dest_or_source_outside_the_group(group, peer):
    rank = group.size if peer == "size" else int(peer)
    for call in (group.send, group.isend, group.send_object):
        with pytest.raises(ss.InvalidArgumentError, match=f"{rank}"):
            call(np.ones(2), rank)
    for call in (group.recv, group.irecv):
        with pytest.raises(ss.InvalidArgumentError, match=f"{rank}"):
            call(np.ones(2), rank)
    with pytest.raises(ss.InvalidArgumentError, match=f"{rank}"):
        group.recv_object(rank)
    with pytest.raises(ss.InvalidArgumentError, match=f"{rank}"):
        group.sendrecv(np.ones(2), rank, np.ones(2), 0)


@pytest.mark.parametrize("given", ["0", 0.0, [], np.float64(0)], ids=repr)
def test_a_rank_or_tag_that_is_no_int(group, given):
    x = np.zeros(2)
    for verb in ("bcast", "reduce", "gather", "gatherv", "scatter"):
        with pytest.raises(TypeError, match=f"^{verb}: root must be an int, got "):
            getattr(group, verb)(x, root=given)
    with pytest.raises(TypeError, match=r"^send: dest must be an int, got "):
        group.send(x, given)
    with pytest.raises(TypeError, match=r"^recv: tag must be an int, got "):
        group.recv(x, 0, given)
    with pytest.raises(TypeError, match=r"^split: key must be an int, got "):
        group.split(0, given)


def test_an_array_in_place_of_the_operator(group):
    with pytest.raises(ss.InvalidArgumentError, match="by keyword: out="):
        group.allreduce(np.zeros(2), np.zeros(2))


def test_dest_must_be_someone(group):
    with pytest.raises(ss.InvalidArgumentError, match="-1"):
        group.send(np.ones(2), ss.ANY)


@pytest.mark.parametrize("tag", [-2, 2**31, 2**40])
def test_tags_outside_the_range(group, tag):
    for call in (group.send, group.recv):
        with pytest.raises(
            (ss.InvalidArgumentError, TypeError, OverflowError), match=f"{tag}|tag|incompatible"
        ):
            call(np.ones(2), 0, tag)


OUTS = [
    (np.zeros(3), "shape|count|3"),
    (np.zeros(2, "f4"), "float32"),
    (np.zeros(2, "i8"), "int64"),
]


@pytest.mark.parametrize(
    ("out", "named"), OUTS, ids=lambda x: str(getattr(x, "dtype", "")) + str(getattr(x, "shape", ""))
)
def test_an_out_that_does_not_fit(group, out, named):
    x, before = np.ones(2), out.copy()
    for call in (group.allreduce, group.bcast):
        with pytest.raises(ss.InvalidArgumentError, match=named):
            call(x, out=out)
    assert_same(x, np.ones(2))
    assert_same(out, before)


def test_an_out_that_does_not_fit_where_the_shape_changes(group):
    n = group.size
    x = np.ones((n, 2))
    for verb, shape in [
        ("allgather", (n, n, 3)),
        ("alltoall", (n, 3)),
        ("reduce_scatter", (3,)),
        ("allgatherv", (n, 3)),
    ]:
        for out in (np.zeros(shape), np.zeros(getattr(group, verb)(x).shape, "f4")):
            with pytest.raises(ss.InvalidArgumentError) as caught:
                getattr(group, verb)(x, out=out)
            assert verb in str(caught.value)
            assert not out.any()


def test_an_out_that_cannot_be_written(group):
    n = group.size
    out = np.zeros((n, 2))
    out.flags.writeable = False
    for verb in ("allreduce", "bcast", "alltoall"):
        with pytest.raises(ss.InvalidArgumentError, match=r"read-only|writ"):
            getattr(group, verb)(np.ones((n, 2)), out=out)
    with pytest.raises(ss.InvalidArgumentError, match=r"read-only|writ"):
        group.allgather(np.ones(2), out=out)
    with pytest.raises(ss.InvalidArgumentError, match=r"read-only|writ"):
        group.recv(out, 0)
    assert not out.any()


def test_an_out_that_is_no_array(group):
    for out in ([0.0, 0.0], "text", 3):
        with pytest.raises(TypeError):
            group.allreduce(np.ones(2), out=out)


def test_an_out_whose_rows_are_the_same_memory(group):
    out = np.lib.stride_tricks.as_strided(np.zeros(2), (3, 2), (0, 8))
    with pytest.raises(ss.InvalidArgumentError):
        group.allreduce(np.ones((3, 2)), out=out)
    x = np.lib.stride_tricks.as_strided(np.zeros(2), (3, 2), (0, 8))
    try:
        got = group.allreduce(x)
    except ss.InvalidArgumentError:
        return
    assert_same(np.array(got), np.zeros((3, 2)))


def test_blocks_that_are_not_one_for_each_rank(group):
    n = group.size
    for shape in [(n + 1, 2), (), (0,)]:
        with pytest.raises(ss.InvalidArgumentError, match="reduce_scatter"):
            group.reduce_scatter(np.ones(shape))
        with pytest.raises(ss.InvalidArgumentError, match="scatter"):
            group.scatter(np.ones(shape))  # on every rank: root tells the others
    with pytest.raises(ss.InvalidArgumentError, match="alltoall"):
        group.alltoall(np.ones(()))
    if n > 1:
        with pytest.raises(ss.InvalidArgumentError, match="alltoall"):
            group.alltoall(np.ones((n + 1, 2)))


def test_scatter_without_an_array_at_root(group):
    with pytest.raises((TypeError, ss.InvalidArgumentError)):
        group.scatter(None)


def test_counts_that_do_not_fit(group):
    n = group.size
    x = np.ones((n, 2))
    no_numbers = [[1.5] * n, ["1"] * n, [np.nan] * n]
    for counts in ([1] * (n + 1), [], [2] * n, [-1, *[1] * (n - 1)], None, *no_numbers):
        with pytest.raises((ss.InvalidArgumentError, TypeError)):
            group.alltoallv(x, counts)
        with pytest.raises((ss.InvalidArgumentError, TypeError)):
            group.scatterv(x, counts)


def test_arrays_without_rows_cannot_be_joined(group):
    for call in (group.allgatherv, group.gatherv):
        with pytest.raises(ss.InvalidArgumentError, match=r"axis|dimension"):
            call(np.ones(()))


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "soon"])
def test_timeouts_that_are_none(group, timeout):
    for call in (
        lambda: group.allreduce(np.ones(2), timeout=timeout),
        lambda: group.barrier(timeout=timeout),
        lambda: group.allgather_object(1, timeout=timeout),
        lambda: group.bcast(np.ones(2), timeout=timeout),
    ):
        with pytest.raises((ss.InvalidArgumentError, TypeError), match=r"timeout|soon"):
            call()


def test_numbers_that_fit_no_dtype(group):
    with pytest.raises(ss.InvalidArgumentError, match=r"64 bits|object"):
        group.allreduce(2**70)


def test_a_mistake_on_one_rank_alone_has_not_begun_anything(group):
    x = np.ones(3)
    if group.rank == 0:
        for bad in (
            lambda: group.allreduce(x, "plus"),
            lambda: group.bcast(x, root=99),
            lambda: group.allreduce("x"),
        ):
            with pytest.raises((ss.InvalidArgumentError, TypeError)):
                bad()
    group.allreduce(x)
    assert_same(x, np.full(3, float(group.size)))


def test_the_functions_want_the_backend_first(group):
    with pytest.raises(TypeError, match="backend"):
        ss.allreduce(np.ones(2), "sum")
    with pytest.raises(TypeError, match="backend"):
        ss.rank(None)
    assert ss.rank(group) == group.rank
    assert ss.total_workers(group) == group.size


def test_a_backend_is_not_made_by_hand_and_not_pickled(group):
    import pickle

    with pytest.raises(TypeError, match="get_distributed_backend"):
        pickle.dumps(group)

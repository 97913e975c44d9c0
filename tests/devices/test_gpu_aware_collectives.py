"""Collectives that only move data, in device memory that MPI takes as it lies.

The stand-in of the runtime lets the host, and so MPI, reach it, and counts what is copied between the two.
"""

from __future__ import annotations

import fake_arrays
import numpy as np
import pytest
import samestep as ss

ranks = pytest.mark.ranks(2, 3, backends=["aware"])


@pytest.fixture
def reachable(monkeypatch):
    monkeypatch.setenv("FAKE_GPU_HOST_ACCESS", "1")


def values(rank, count):
    return (np.arange(count) % 97 + 1000 * rank).astype("float32")


LONG = 5000  # elements, more than travel with a header


def moved(group, verb, count=LONG):
    """Calls a verb on arrays that are made late; what it gave, what it should give, and the bytes that it copied."""
    stream, n, rank = fake_arrays.Stream(), group.size, group.rank

    def late(array):
        made = fake_arrays.Array(array.shape, array.dtype, stream)
        stream.delay(3000)
        made.set(array)
        return made

    mine, blocks = values(rank, count), np.stack([values(10 * rank + k, count) for k in range(n)])
    uneven = [values(r, count + 100 * r) for r in range(n)]
    counts = [count + 100 * r for r in range(n)]
    root = n - 1
    at_root = rank == root
    crooked = [[count + 10 * s + k for k in range(n)] for s in range(n)]
    calls = {
        "bcast": (lambda x: group.bcast(x, root=root), mine, values(root, count)),
        "allgather": (group.allgather, mine, np.stack([values(r, count) for r in range(n)])),
        "allgatherv": (group.allgatherv, uneven[rank], np.concatenate(uneven)),
        "gather": (
            lambda x: group.gather(x, root=root),
            mine,
            np.stack([values(r, count) for r in range(n)]) if at_root else None,
        ),
        "gatherv": (
            lambda x: group.gatherv(x, root=root),
            uneven[rank],
            np.concatenate(uneven) if at_root else None,
        ),
        "scatter": (
            lambda x: group.scatter(x if at_root else None, root=root, out=out),
            blocks,
            values(10 * root + rank, count),
        ),
        "scatterv": (
            lambda x: group.scatterv(x if at_root else None, counts if at_root else None, root=root, out=out),
            np.concatenate(uneven),
            uneven[rank],
        ),
        "alltoall": (
            group.alltoall,
            blocks.reshape(-1),
            np.concatenate([values(10 * r + rank, count) for r in range(n)]),
        ),
        "alltoallv": (
            lambda x: group.alltoallv(x, crooked[rank]),
            np.concatenate([values(10 * rank + k, crooked[rank][k]) for k in range(n)]),
            np.concatenate([values(10 * r + rank, crooked[r][rank]) for r in range(n)]),
        ),
    }
    call, given, expected = calls[verb]
    out = late(np.zeros(counts[rank] if verb == "scatterv" else count, "float32"))
    x = late(given)
    before = fake_arrays.crossed(), group.counters().bytes
    got = call(x)
    copied, sent = fake_arrays.crossed() - before[0], group.counters().bytes - before[1]
    got = got[0] if verb == "alltoallv" else got
    if got is not None:
        got = got.get() if isinstance(got, fake_arrays.Array) else got.numpy()
    return got, expected, copied, sent


VERBS = [
    "bcast",
    "allgather",
    "allgatherv",
    "gather",
    "gatherv",
    "scatter",
    "scatterv",
    "alltoall",
    "alltoallv",
]


@pytest.mark.parametrize("verb", VERBS)
@ranks
def test_runs_go_to_mpi_as_they_lie(group, reachable, verb):
    got, expected, copied, sent = moved(group, verb)
    np.testing.assert_array_equal(got, expected) if expected is not None else None
    assert copied == 0, f"{copied} bytes went through the host"
    total = sum(group.allgather(np.array([sent], "int64")).reshape(-1).tolist())
    assert total >= 4 * LONG * (group.size - 1), "they did not go to MPI at all"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.ranks(1, backends=["aware"])
def test_alone_there_is_nothing_to_hand_over(group, verb):
    got, expected, _, _ = moved(group, verb)  # MPI would die of this memory
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("verb", VERBS)
@ranks
def test_short_runs_go_through_the_host(group, verb):
    got, expected, copied, _ = moved(group, verb, count=10)
    np.testing.assert_array_equal(got, expected) if expected is not None else None
    assert copied > 0


@ranks
def test_each_rank_chooses_by_its_own_runs(group, reachable):
    """The last rank's rows are few, so that root and it have them on the host, and the others by address."""
    n, stream = group.size, fake_arrays.Stream()
    rows = [LONG if r < n - 1 else 3 for r in range(n)]
    x = fake_arrays.Array.of(values(group.rank, rows[group.rank]), stream)
    before = fake_arrays.crossed()
    got = group.gatherv(x, root=n - 1)
    went_through_the_host = fake_arrays.crossed() > before
    assert went_through_the_host == (group.rank == n - 1)
    if group.rank == n - 1:
        expected = np.concatenate([values(r, rows[r]) for r in range(n)])
        np.testing.assert_array_equal(got.numpy(), expected)


@ranks
def test_ranks_that_do_not_agree_are_told_and_go_on(group, reachable):
    count = LONG if group.rank == 0 else 10  # by address here, through the host there
    with pytest.raises(ss.MismatchError, match="5000"):
        group.allgather(fake_arrays.Array.of(values(group.rank, count), fake_arrays.Stream()))
    got, expected, _, _ = moved(group, "allgather")
    np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
@ranks
def test_a_long_bcast_goes_in_pieces(group, reachable):
    """Each piece as it lies but the last, which is short."""
    count = 3 * (4 << 20) // 4 + 5
    x = fake_arrays.Array.of(values(group.rank, count), fake_arrays.Stream())
    before = fake_arrays.crossed()
    group.ibcast(x, root=0).wait()
    assert fake_arrays.crossed() - before == 5 * 4
    np.testing.assert_array_equal(x.get(), values(0, count))


@pytest.mark.parametrize("verb", ["allreduce", "reduce", "reduce_scatter"])
@ranks
def test_reductions_still_go_through_the_host(group, verb):
    n, stream = group.size, fake_arrays.Stream()
    inputs = [np.stack([values(r + k, LONG) for k in range(n)]) for r in range(n)]
    x = fake_arrays.Array.of(inputs[group.rank], stream)
    got = getattr(group, verb)(x)  # it would die: MPI cannot reach this memory
    got = got.get() if isinstance(got, fake_arrays.Array) else got.numpy()
    expected = sum(inputs)
    if verb == "reduce_scatter":
        expected = expected[group.rank]
    elif verb == "reduce" and group.rank != 0:
        expected = inputs[group.rank]
    np.testing.assert_array_equal(got, expected)

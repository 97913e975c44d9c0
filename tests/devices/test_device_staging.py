"""Through the host: windows of every operation, no slow calls in the steady state, memory that ranks share."""

from __future__ import annotations

import re

import fake_arrays
import numpy as np
import pytest
import samestep as ss

WORLDS = ["staged", "staged-native", "staged-direct"]  # with segments of 64 KiB
ranks = pytest.mark.ranks(1, 2, 3, backends=WORLDS)
COUNTS = (0, 1, 5, 16_384, 50_001)  # of a block: less than a segment, a whole number of them, and not
counts = pytest.mark.parametrize("count", COUNTS)


def row(rank, count):
    return (np.arange(count) % 1009 + 10 * rank).astype("float32")


def rows(rank, size, count):
    return np.stack([row(rank + 3 * k, count) for k in range(size)])


def on_device(values):
    return fake_arrays.Array.of(values, fake_arrays.Stream())


@ranks
@counts
def test_each_operation_on_blocks(group, count):
    n, rank, root = group.size, group.rank, group.size - 1
    whole = on_device(np.zeros((n, count), "float32"))
    group.allgather(on_device(row(rank, count)), out=whole)
    np.testing.assert_array_equal(whole.get(), np.stack([row(r, count) for r in range(n)]))
    whole = on_device(np.zeros((n, count), "float32"))
    group.gather(on_device(row(rank, count)), root=root, out=whole if rank == root else None)
    if rank == root:
        np.testing.assert_array_equal(whole.get(), np.stack([row(r, count) for r in range(n)]))
    part = on_device(np.zeros(count, "float32"))
    group.scatter(on_device(rows(root, n, count)) if rank == root else None, root=root, out=part)
    np.testing.assert_array_equal(part.get(), rows(root, n, count)[rank])
    group.reduce_scatter(on_device(rows(rank, n, count)), out=part)
    np.testing.assert_array_equal(part.get(), sum(rows(r, n, count)[rank] for r in range(n)))
    group.alltoall(on_device(rows(rank, n, count)), out=whole)
    np.testing.assert_array_equal(whole.get(), np.stack([rows(r, n, count)[rank] for r in range(n)]))


@ranks
@counts
def test_each_operation_on_blocks_of_different_lengths(group, count):
    """Rank 1 has none, and the others have different ones: some have more windows than others."""
    n, rank, root = group.size, group.rank, group.size - 1
    lengths = [count * k if k != 1 else 0 for k in range(1, n + 1)]
    table = [[count * ((r + k) % 3) for k in range(n)] for r in range(n)]
    mine, joined = row(rank, lengths[rank]), np.concatenate([row(r, lengths[r]) for r in range(n)])
    whole = on_device(np.zeros_like(joined))
    group.allgatherv(on_device(mine), out=whole)
    np.testing.assert_array_equal(whole.get(), joined)
    whole = on_device(np.zeros_like(joined))
    group.gatherv(on_device(mine), root, out=whole if rank == root else None)
    if rank == root:
        np.testing.assert_array_equal(whole.get(), joined)
    part = on_device(np.zeros_like(mine))
    group.scatterv(*(whole, lengths) if rank == root else (None, None), root, out=part)
    np.testing.assert_array_equal(part.get(), mine)
    sent = [[row(r + 3 * k, table[r][k]) for k in range(n)] for r in range(n)]
    expected = np.concatenate([sent[r][rank] for r in range(n)])
    received = on_device(np.zeros_like(expected))
    _, received_lengths = group.alltoallv(on_device(np.concatenate(sent[rank])), table[rank], out=received)
    np.testing.assert_array_equal(received.get(), expected)
    assert received_lengths == [table[r][rank] for r in range(n)]


@ranks
@counts
def test_in_place(group, count):
    """Also where the output overlaps more of the input than its own block."""
    n, rank = group.size, group.rank
    x = on_device(rows(rank, n, count))
    group.alltoall(x, out=x)
    np.testing.assert_array_equal(x.get(), np.stack([rows(r, n, count)[rank] for r in range(n)]))
    whole = on_device(rows(rank, n, count).reshape(-1))
    group.reduce_scatter(Reshaped(whole, (n, count)), out=whole.part(rank * count, (rank + 1) * count))
    expected = sum(rows(r, n, count)[rank] for r in range(n))
    np.testing.assert_array_equal(whole.get()[rank * count : (rank + 1) * count], expected)


@ranks
@counts
def test_blocks_of_different_lengths_in_place(group, count):
    """Also where this rank's blocks end before those of others: nothing is overwritten that has not been read."""
    n, rank = group.size, group.rank
    lengths = [count * (10 + 2 * r) for r in range(n)]
    joined = np.concatenate([row(r, lengths[r]) for r in range(n)])
    begin = 9 * lengths[rank] // 10  # the first window is written where the last one is read
    for _ in range(5):
        memory = on_device(np.concatenate([row(rank, lengths[rank]), np.zeros_like(joined)]))
        group.allgatherv(memory.part(0, lengths[rank]), out=memory.part(begin, begin + len(joined)))
        np.testing.assert_array_equal(memory.get()[begin : begin + len(joined)], joined)


@pytest.mark.ranks(3, backends=WORLDS)
@counts
@pytest.mark.parametrize("known", [True, False], ids=["all-lengths-known", "own-lengths-known"])
def test_alltoallv_of_different_lengths_in_place(group, count, known):
    n, rank = group.size, group.rank
    table = [[count * k for k in blocks] for blocks in ([0, 10, 5], [5, 14, 0], [10, 0, 0])]
    sent = [[row(r + 3 * k, table[r][k]) for k in range(n)] for r in range(n)]
    expected = np.concatenate([sent[r][rank] for r in range(n)])
    for _ in range(5):
        x = on_device(np.concatenate(sent[rank]))
        out = x if rank == 0 else on_device(np.zeros_like(expected))  # only it receives as much as it sends
        if known:
            group.alltoallv(x, table[rank], out=out)
        else:
            group._comm.alltoallv(x, table[rank], out, [table[r][rank] for r in range(n)]).wait(60, True)
        np.testing.assert_array_equal(out.get(), expected)


@ranks
@counts
def test_ranks_that_know_only_their_own_lengths(group, count):
    """As in torch's all_to_all, and in its all_gather of different lengths. Rank 1 has the shortest blocks."""
    n, rank = group.size, group.rank
    lengths = [count * k if k != 1 else 0 for k in range(1, n + 1)]
    joined = np.concatenate([row(r, lengths[r]) for r in range(n)])
    whole = on_device(np.zeros_like(joined))
    group._comm.allgatherv(on_device(row(rank, lengths[rank])), whole, lengths).wait(60, True)
    np.testing.assert_array_equal(whole.get(), joined)
    table = [[count * ((r + k) % 3) for k in range(n)] for r in range(n)]
    sent = [[row(r + 3 * k, table[r][k]) for k in range(n)] for r in range(n)]
    expected = np.concatenate([sent[r][rank] for r in range(n)])
    out, received = on_device(np.zeros_like(expected)), [table[r][rank] for r in range(n)]
    group._comm.alltoallv(on_device(np.concatenate(sent[rank])), table[rank], out, received).wait(60, True)
    np.testing.assert_array_equal(out.get(), expected)


@pytest.mark.ranks(2, 3, backends=WORLDS)
def test_ranks_that_expect_other_lengths_are_told_so_and_go_on(group):
    """The last rank sends each rank 70,000 elements, which expect as many as they send: 30,000."""
    n, rank = group.size, group.rank
    count = 70_000 if rank == n - 1 else 30_000
    x, out = on_device(np.ones(n * count, "float32")), on_device(np.zeros(n * count, "float32"))
    for _ in range(2):
        work = group._comm.alltoallv(x, [count] * n, out, [count] * n)
        with pytest.raises(
            ss.MismatchError, match=r"rank 0 sends 30000 elements to rank ., which expects 70000"
        ):
            work.wait(60, True)
    small = on_device(row(0, 5))
    group.allreduce(small)
    np.testing.assert_array_equal(small.get(), n * row(0, 5))


class Reshaped:
    def __init__(self, array, shape):
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "shape": shape}


@pytest.mark.ranks(2, 3, backends=WORLDS)
def test_ranks_that_differ_are_told_so_and_go_on(group):
    """Though they would begin with different numbers of windows."""
    count = 10 if group.rank == 0 else 100_000
    with pytest.raises(ss.MismatchError, match="allgather"):
        group.allgather(on_device(row(0, count)))
    x = on_device(row(0, 5))
    group.allreduce(x)
    np.testing.assert_array_equal(x.get(), group.size * row(0, 5))


def messages(group, count):
    """A call to be repeated; see `verbs`."""
    n, stream = group.size, fake_arrays.Stream()
    right, left = (group.rank + 1) % n, (group.rank - 1) % n
    sent, received = (fake_arrays.Array.of(np.ones(count, "float32"), stream) for _ in range(2))

    def exchange():
        work = group.isend(sent, right)
        group.recv(received, left, timeout=60)
        work.wait(host=True)

    return exchange


def verbs(group, count):
    """Calls to be repeated, which make no new arrays and return when the device has ended."""
    n, stream = group.size, fake_arrays.Stream()
    x, y = (fake_arrays.Array.of(row(0, count), stream) for _ in range(2))
    whole, other = (fake_arrays.Array.of(rows(0, n, count), stream) for _ in range(2))
    line, other_line = Reshaped(whole, (n * count,)), Reshaped(other, (n * count,))
    lengths = [count] * n
    return {
        "allreduce": lambda: group.allreduce(x, "max", timeout=60),
        "bcast": lambda: group.bcast(x, timeout=60),
        "bcast with out": lambda: group.bcast(x, out=y, timeout=60),
        "allgather": lambda: group.allgather(x, out=whole, timeout=60),
        "gather": lambda: group.gather(x, out=whole if group.rank == 0 else None, timeout=60),
        "scatter": lambda: group.scatter(whole if group.rank == 0 else None, out=x, timeout=60),
        "reduce_scatter": lambda: group.reduce_scatter(whole, "max", out=x, timeout=60),
        "alltoall": lambda: group.alltoall(whole, out=other, timeout=60),
        "allgatherv": lambda: group.allgatherv(x, out=line, timeout=60),
        "gatherv": lambda: group.gatherv(x, out=line if group.rank == 0 else None, timeout=60),
        "scatterv": lambda: group.scatterv(
            *(line, lengths) if group.rank == 0 else (None, None), out=x, timeout=60
        ),
        "alltoallv": lambda: group.alltoallv(line, lengths, out=other_line, timeout=60),
        "alltoallv, lengths unknown": lambda: group._comm.alltoallv(line, lengths, other_line, lengths).wait(
            60, True
        ),
        "send and recv": messages(group, count),
    }


@pytest.mark.ranks(1, 2, backends=["staged", "fakes"])
def test_root_s_copy_comes_between_what_is_before_and_after_it(group):
    """Its array is computed late, and overwritten right after the call, in a stream of its own."""
    for place in ((0, 1000), (100, 1100)):  # apart, and in part where it is sent from
        memory = on_device(np.zeros(1100, "float32"))
        apart = place == (0, 1000)
        x = memory.part(0, 1000)
        out = on_device(np.zeros(1000, "float32")) if apart else memory.part(*place)
        memory.stream.synchronize()
        if apart:
            memory.stream.hold()
        memory.set(row(7, 1100))
        work = group.ibcast(x, root=0, out=out) if apart else None
        if apart:
            memory.set(row(8, 1100))
            memory.stream.release()
            work.wait(60, host=True)
        else:
            group.bcast(x, root=0, out=out, timeout=60)
        np.testing.assert_array_equal(out.get(), row(7, 1000))


@ranks
def test_what_is_repeated_neither_pins_nor_allocates_nor_waits_for_a_stream(group):
    """But blocks for the three windows that can be in flight together, and for a shorter last one."""
    n_calls, n_blocks = 12, 4
    for name, call in verbs(group, 50_001).items():
        before = fake_arrays.slow_calls()
        for _ in range(n_calls):
            call()
        after = fake_arrays.slow_calls()
        assert after.pinned - before.pinned <= n_blocks, name
        assert (after.allocated, after.synchronized) == (before.allocated, before.synchronized), name


@ranks
def test_no_collective_copies_more_than_a_segment_at_once(group):
    """So that copies to the host, the operation there and copies back overlap."""
    for name, call in verbs(group, 50_001).items():
        fake_arrays.longest_copy()
        call()
        assert name in ("send and recv", "bcast with out") or 0 < fake_arrays.longest_copy() <= 64 << 10, name


@pytest.mark.slow
@pytest.mark.ranks(1, backends=WORLDS)  # which keeps them whole
def test_messages_longer_than_the_pool_keeps_at_first_are_not_pinned_again(group):
    exchange = messages(group, 5 << 20)  # 20 MiB, of which two and more lie in the pool
    for _ in range(3):
        exchange()
    before = fake_arrays.slow_calls().pinned
    exchange()
    assert fake_arrays.slow_calls().pinned == before


@ranks
def test_a_tree_waits_once_for_each_message(group):
    """Until all of its leaves have arrived on the host, and once until all have gone back."""
    stream = fake_arrays.Stream()
    tree = [fake_arrays.Array.of(row(k, 100 + k), stream) for k in range(50)]
    for _ in range(2):
        group.allreduce_tree(tree, "max")
    before = fake_arrays.slow_calls().synchronized
    group.allreduce_tree(tree, "max")
    assert fake_arrays.slow_calls().synchronized - before <= 2


@ranks
def test_a_tree_is_packed_before_it_is_copied(group):
    stream = fake_arrays.Stream()
    values = [row(k, 100 + k) for k in range(50)]
    tree = [fake_arrays.Array.of(value, stream) for value in values]
    stream.synchronize()
    fake_arrays.longest_copy()
    group.allreduce_tree(tree, "max")
    assert fake_arrays.longest_copy() == sum(value.nbytes for value in values)
    for leaf, value in zip(tree, values, strict=True):
        np.testing.assert_array_equal(leaf.get(), value)


@pytest.mark.ranks(2, backends=["staged-native"])
def test_the_wait_for_a_stream_is_a_part_of_the_timeout(group):
    own = group.group([0, 1])  # which the error ends
    if group.rank == 0:
        x = fake_arrays.Array.of(np.ones(5, "float32"), fake_arrays.Stream())
        x.stream.delay(700_000)
        x.set(np.ones(5, "float32"))
        with pytest.raises(ss.TimeoutError, match="rank 1") as caught:
            own.same({"x": x}, timeout=1.5)
        waited = float(re.search(r"waited (\S+) s", str(caught.value))[1])
        assert waited < 1.4  # 0.8 and what a busy machine adds
    group.barrier()

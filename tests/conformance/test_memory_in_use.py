"""Operations in progress on the same memory: as if each had been waited for, or refused by name."""

import array
import time

import numpy as np
import pytest
import samestep as ss
from reference import assert_same

pytestmark = pytest.mark.ranks(1, 2, 3)

COUNTS = [0, 1, 100, 100_000]
LONG = 1_000_000
"""Elements of a message that no transport takes before it is received."""


def contiguous(count):
    return np.empty(count)


def with_gaps(count):
    return np.empty((count, 2))[:, 0]


def backwards(count):
    return np.empty(count)[::-1]


LAYOUTS = [contiguous, with_gaps, backwards]


def of_rank(group, layout, count):
    """Rank r has r + 1: the sum is 1, 3 or 6."""
    x = layout(count)
    x[:] = group.rank + 1
    return x


def total(group):
    return group.size * (group.size + 1) // 2


def filled(like, value):
    return np.full(like.shape, float(value))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("layout", LAYOUTS)
class TestCollectives:
    def test_twice_in_place(self, group, layout, count):
        x = of_rank(group, layout, count)
        works = [group.iallreduce(x) for _ in range(3)]
        for work in reversed(works):
            work.wait()
        assert_same(x, filled(x, total(group) * group.size**2))

    def test_a_result_that_the_next_one_reads(self, group, layout, count):
        x, y = of_rank(group, layout, count), layout(count)
        first = group.iallreduce(x)
        second = group.iallreduce(x, out=y)
        second.wait()
        first.wait()
        assert_same(x, filled(x, total(group)))
        assert_same(y, filled(y, total(group) * group.size))

    def test_a_result_over_what_the_one_before_reads(self, group, layout, count):
        x, y, z = of_rank(group, layout, count), layout(count), of_rank(group, layout, count)
        first = group.iallreduce(x, out=y)
        second = group.iallreduce(z, "prod", out=x)
        second.wait()
        first.wait()
        assert_same(y, filled(y, total(group)))
        assert_same(x, filled(x, np.prod(np.arange(1.0, group.size + 1))))

    def test_a_blocking_one_behind(self, group, layout, count):
        x = of_rank(group, layout, count)
        first = group.ibcast(x, root=group.size - 1)
        group.allreduce(x)
        first.wait()
        assert_same(x, filled(x, group.size**2))

    def test_of_another_group(self, group, layout, count):
        other = group.split(0)
        x = of_rank(group, layout, count)
        first = group.iallreduce(x)
        second = other.iallreduce(x)
        second.wait()
        first.wait()
        assert_same(x, filled(x, total(group) * group.size))
        other.close()

    def test_a_tree(self, group, layout, count):
        x = of_rank(group, layout, count)
        first = group.iallreduce(x)
        tree = group.allreduce_tree({"x": x, "y": np.ones(3)})
        first.wait()
        assert_same(tree["x"], filled(x, total(group) * group.size))

    def test_a_part(self, group, layout, count):
        x = of_rank(group, layout, count)
        first = group.iallreduce(x)
        second = group.iallreduce(x[count // 2 :])
        first.wait()
        second.wait()
        want = filled(x, total(group))
        want[count // 2 :] *= group.size
        assert_same(x, want)

    def test_other_elements_between_these(self, group, layout, count):
        both = np.empty((count, 4))
        both[...] = group.rank + 1
        works = [group.iallreduce(both[:, i]) for i in range(4)]
        for work in works:
            work.wait()
        assert_same(both, filled(both, total(group)))


def test_what_both_only_read_is_not_waited_for(group):
    x, y, z = np.full(3, group.rank + 1.0), np.empty(3), np.empty(3)
    if group.rank == 0:
        work = group.iallreduce(x, out=y)
        for peer in range(1, group.size):
            group.send(x, peer)  # which the peer awaits before it starts the operation in progress here
    else:
        group.recv(z, 0)
        work = group.iallreduce(x, out=y)
    work.wait()
    assert_same(y, filled(y, total(group)))


def test_the_error_of_the_first_is_its_own(group):
    if group.size == 1:
        pytest.skip("one rank agrees with itself")
    x = np.ones(3)
    first = group.iallreduce(x, "sum" if group.rank == 0 else "max")
    group.allreduce(x)
    assert_same(x, filled(x, group.size))
    with pytest.raises(ss.MismatchError):
        first.wait()


@pytest.mark.parametrize("tail", [0, 5])
def test_a_receive_over_what_is_sent_is_refused(group, tail):
    if group.size == 1:
        pytest.skip("what a rank sends itself has arrived at once")
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x, y = np.full(LONG, float(group.rank)), np.empty(LONG)
    sent = group.isend(x, right)
    if not sent.done():
        with pytest.raises(ss.InvalidArgumentError, match=r"^recv: .* a message in progress uses it; wait"):
            group.irecv(x[tail:], left)
    group.barrier()  # until here nobody receives
    group.recv(y, left)
    sent.wait()
    assert_same(y, filled(y, left))


def test_messages_over_what_is_received_are_refused(group):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x, y = np.empty(10), np.full(10, float(group.rank))
    received = group.irecv(x, left)
    with pytest.raises(ss.InvalidArgumentError, match=r"^send: .* written by a receive in progress; wait"):
        group.isend(x[3:], right)
    with pytest.raises(ss.InvalidArgumentError, match=r"^recv: .* a message in progress uses it; wait"):
        group.recv(x[:3], left)
    group.barrier()  # until here nobody sends
    group.send(y, right)
    received.wait()
    assert_same(x, filled(x, left))


def test_a_collective_behind_a_receive(group):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x, y = np.empty(LONG), np.full(LONG, group.rank + 1.0)
    received = group.irecv(x, left)
    sent = group.isend(y, right)
    group.allreduce(x)
    assert_same(x, filled(x, total(group)))
    received.wait()
    sent.wait()


def test_the_edges_of_a_grid_with_one_corner_each(group):
    """Rows and columns in one matrix are other elements, though the columns reach from the first row to the last."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    grid = np.zeros((5, 6))
    grid[1:-1, 1:-1] = group.rank + 1
    works = [
        group.irecv(grid[1:-1, 0], left, 1),
        group.irecv(grid[1:-1, -1], right, 2),
        group.irecv(grid[0, 1:-1], left, 3),
        group.irecv(grid[-1, 1:-1], right, 4),
        group.isend(grid[1:-1, -2], right, 1),
        group.isend(grid[1:-1, 1], left, 2),
        group.isend(grid[-2, 1:-1], right, 3),
        group.isend(grid[1, 1:-1], left, 4),
    ]
    for work in works:
        work.wait()
    want = np.zeros((5, 6))
    want[1:-1, 1:-1] = group.rank + 1
    want[1:-1, 0] = want[0, 1:-1] = left + 1
    want[1:-1, -1] = want[-1, 1:-1] = right + 1
    assert_same(grid, want)


def any_view(rng, x):
    """Every so many elements of an array of 720 bytes, along one to three dimensions, in any order."""
    x = x.view(f"u{rng.choice([1, 2, 4])}")
    x = x.reshape([(-1,), (12, -1), (6, 10, -1)][rng.integers(3)])
    cuts = []
    for extent in x.shape:
        first, last = sorted(rng.integers(0, extent + 1, 2))
        cuts.append(slice(first, last, rng.integers(1, 4)))
    return x[tuple(cuts)][:: rng.choice([1, -1])]


@pytest.mark.ranks(1)
def test_exactly_what_has_elements_in_common_is_refused(group):
    rng = np.random.default_rng(3)
    x = np.zeros(720, np.uint8)
    n_refused = 0
    for _ in range(1000):
        written, read = any_view(rng, x), any_view(rng, x)
        received = group.irecv(written, group.rank, 2)
        if np.shares_memory(written, read):
            n_refused += 1
            with pytest.raises(ss.InvalidArgumentError, match="written by a receive in progress"):
                group.isend(read, group.rank)
        else:
            group.isend(read, group.rank, 1).wait()
            group.recv(np.empty_like(read), group.rank, 1)
        received._inner.cancel()
        del received
    assert 200 < n_refused < 800


@pytest.mark.ranks(1)
def test_a_call_takes_no_longer_for_the_operations_in_progress_elsewhere(group):
    """Those of other elements, of which one is long; a search that looked at each of them would be felt."""

    def seconds_of_one(n):
        x = np.empty((n, 8))
        works = [group.irecv(np.empty(100 * n))]
        begin = time.thread_time()
        works += [group.irecv(row) for row in x]
        took = time.thread_time() - begin
        for work in works:
            work._inner.cancel()
        return took / n

    assert seconds_of_one(16_000) < 8 * seconds_of_one(500)


@pytest.mark.parametrize("count", [3, 100_000])
class TestReaders:
    """Calls that read a tree see what an operation in progress writes there."""

    def test_accumulator(self, group, count):
        x, mean = of_rank(group, contiguous, count), ss.Accumulator(group)
        work = group.iallreduce(x)
        mean.add({"x": x})
        found = mean.mean()["x"]
        work.wait()
        assert_same(found, filled(x, total(group)))

    def test_accumulator_of_memory_without_dlpack(self, group, count):
        x, mean = array.array("d", [group.rank + 1.0]) * count, ss.Accumulator(group)
        work = group.iallreduce(x)
        mean.add({"x": x})
        found = mean.mean()["x"]
        work.wait()
        assert_same(np.asarray(found), filled(found, group.size * (group.size + 1) / 2))

    def test_same(self, group, count):
        x = of_rank(group, contiguous, count)
        work = group.iallreduce(x)
        assert len(group.same({"x": x})) == 32
        work.wait()


@pytest.mark.parametrize("count", [4, LONG])
def test_a_receive_that_is_given_back_frees_its_array(group, count):
    """As a cancelled `await` does: the same array may be received into again, whatever has arrived of the message."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x, y = np.empty(count), np.full(count, float(group.rank))
    first = group.irecv(x, left)
    sent = group.isend(y, right)
    group.barrier()
    assert first._inner.give_back()
    group.irecv(x, left).wait()
    sent.wait()
    assert_same(x, filled(x, left))


def test_nothing_is_left_behind(group):
    x = np.ones(5)
    for _ in range(3):
        group.iallreduce(x).wait()
        work = group.iallreduce(x)
        del work
        assert group.iallreduce(x).wait() is x
    received = group.irecv(x)
    received._inner.cancel()
    del received
    assert not ss._core.memory_is_in_use()

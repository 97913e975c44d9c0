"""The `Work` of the i... verbs: any number outstanding, finished in any order, or dropped."""

import asyncio
import gc
import itertools

import numpy as np
import pytest
import samestep as ss
from reference import assert_same, reduced, values

pytestmark = pytest.mark.ranks(1, 2, 3)


def expected_sum(group, seed, count=1000):
    return reduced([values(rank, count, "float32", seed=seed) for rank in range(group.size)], "sum")


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_finished_in_any_order(group, order):
    arrays = [values(group.rank, 1000, "float32", seed=seed) for seed in range(4)]
    works = [group.iallreduce(x) for x in arrays]
    for i in order if group.rank % 2 == 0 else reversed(order):  # another order on other ranks
        assert works[i].wait() is arrays[i]
        assert_same(arrays[i], expected_sum(group, i))


def test_a_hundred_outstanding_operations_of_all_kinds(group):
    n, rank = group.size, group.rank
    works = []
    for i in range(25):
        works.append((group.iallreduce(np.full(i, 1.0)), np.full(i, float(n))))
        works.append((group.ibcast(np.full(3, float(rank)), root=i % n), np.full(3, float(i % n))))
        works.append((group.iallgather(np.full(2, rank)), np.stack([np.full(2, r) for r in range(n)])))
        works.append((group.ireduce_scatter(np.ones((n, i))), np.full(i, float(n))))
    for work, expected in reversed(works):
        assert_same(work.wait(), expected)


def test_large_and_small_ones_mixed(group):
    arrays = [values(group.rank, count, "float32", seed=count) for count in (300_000, 3, 100_000, 0, 17)]
    works = [group.iallreduce(x) for x in arrays]
    for x, work in reversed(list(zip(arrays, works, strict=True))):
        work.wait()
        assert_same(x, expected_sum(group, x.size, x.size))


def test_done_makes_progress_and_wait_may_be_repeated(group):
    x = values(group.rank, 50_000, "float32")
    work = group.iallreduce(x)
    while not work.done():
        pass
    assert work.exception() is None
    assert work.wait() is x
    assert work.wait() is x
    assert_same(x, expected_sum(group, 0, 50_000))


def test_a_blocking_call_with_others_outstanding(group):
    a = np.ones(5)
    work = group.iallreduce(a)
    b = np.ones(5)
    group.allreduce(b, "prod")
    group.barrier()
    work.wait()
    assert_same(a, np.full(5, float(group.size)))
    assert_same(b, np.ones(5))


def test_awaited(group):
    async def one(seed):
        return await group.iallreduce(values(group.rank, 1000, "float32", seed=seed))

    async def all_of_them():
        return await asyncio.gather(*(one(seed) for seed in range(5)))

    for seed, got in enumerate(asyncio.run(all_of_them())):
        assert_same(got, expected_sum(group, seed))


async def cancelled(work, steps):
    """Cancels the await of a Work after so many steps of the event loop. Returns its result, if it was done by then."""
    task = asyncio.ensure_future(work)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


@pytest.mark.parametrize("count", [0, 5, 100_000])
def test_a_cancelled_receive_leaves_its_message_to_the_next(group, count):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size

    async def receive(i):
        out, message = np.empty(count), np.full(count, float(i))
        receiving = group.irecv(out, left, 9)
        sent = group.isend(message, right, 9) if i % 2 else None
        got = await cancelled(receiving, steps=1 + i)  # before the message comes, while it comes, or later
        sent = sent or group.isend(message, right, 9)
        if got is None:
            await group.irecv(out, left, 9)
        await sent
        assert_same(out, message)

    for i in range(30):
        asyncio.run(receive(i))
    group.barrier()
    assert group.iprobe() is None


def test_messages_of_cancelled_receives_keep_their_order(group):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    works = [group.irecv_object(left, 9) for _ in range(3)]
    for i in range(3):
        group.send_object(i, right, 9)
    group.barrier()
    while not all(work.done() for work in works):
        pass

    for work in works:
        work._leave()
    with pytest.raises(ss.TimeoutError, match="cancelled"):
        works[0].wait()
    assert [group.recv_object(left, 9) for _ in range(3)] == [0, 1, 2]


def test_an_allreduce_goes_on_when_its_await_is_cancelled(group):
    x = values(group.rank, 50_000, "float32")

    work = group.iallreduce(x)

    async def wait():
        await work

    async def main():
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    work.wait()
    assert_same(x, expected_sum(group, 0, 50_000))


def test_a_dropped_work_is_carried_out(group):
    x = values(group.rank, 10_000, "float32")
    group.iallreduce(x)
    gc.collect()
    group.barrier()
    assert_same(x, expected_sum(group, 0, 10_000))


def test_arrays_stay_alive_in_the_work(group):
    work = group.iallreduce(values(group.rank, 200_000, "float32"))
    gc.collect()
    noise = [np.full(200_000, -1.0, "float32") for _ in range(5)]
    got = work.wait()
    assert_same(got, expected_sum(group, 0, 200_000))
    assert len(noise) == 5


def test_a_strided_array_is_written_when_the_work_ends(group):
    block = np.zeros((1000, 3), "float32")
    block[:, 1] = values(group.rank, 1000, "float32")
    group.iallreduce(block[:, 1]).wait()
    assert_same(block[:, 1].copy(), expected_sum(group, 0))
    assert not block[:, ::2].any()


def test_every_verb_has_a_twin(group):
    n, rank = group.size, group.rank
    x = values(rank, (n, 3), "float32")
    blocks = [values(r, (n, 3), "float32") for r in range(n)]
    assert_same(group.ireduce(x.copy()).wait(), reduced(blocks, "sum") if rank == 0 else x)
    got = group.igather(x).wait()
    assert got is None if rank else np.array_equal(got, np.stack(blocks))
    assert_same(group.iscatter(x if rank == 0 else None).wait(), blocks[0][rank])
    assert_same(group.ialltoall(x).wait(), np.stack([b[rank] for b in blocks]))
    assert_same(group.iallgatherv(x).wait(), np.concatenate(blocks))
    got = group.igatherv(x).wait()
    assert got is None if rank else np.array_equal(got, np.concatenate(blocks))
    at_root = (np.concatenate(blocks), [n] * n) if rank == 0 else ()
    assert_same(group.iscatterv(*at_root).wait(), blocks[rank])
    rows, counts = group.ialltoallv(x, [1] * n).wait()
    assert_same(rows, np.stack([b[rank] for b in blocks]))
    assert list(counts) == [1] * n
    out = np.empty_like(x)
    status = group.isendrecv(x, (rank + 1) % n, out, (rank - 1) % n).wait()
    assert status.source == (rank - 1) % n
    assert_same(out, blocks[(rank - 1) % n])
    assert group.ibarrier().wait() is None


def test_a_barrier_is_not_done_before_the_last_has_entered(group):
    if group.size == 1:
        pytest.skip("takes two ranks")
    if group.rank == 0:
        for source in range(1, group.size):
            group.recv(
                np.empty(1), source, tag=3
            )  # it has polled its barrier many times before it sends this
        work = group.ibarrier()
    else:
        work = group.ibarrier()
        assert not any(work.done() for _ in range(1000))
        group.send(np.zeros(1), 0, tag=3)
    work.wait()

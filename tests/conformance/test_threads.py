"""Several threads of each rank at once: in different groups, in groups that they make, and at one operation."""

import functools

import numpy as np
import pytest
import samestep as ss
import samestep.distributed as dist
from at_once import run_at_once
from reference import assert_same
from samestep import _core
from samestep.trees import fusion

# Without the GIL the threads run in parallel; with it, whenever one waits.
pytestmark = pytest.mark.ranks(1, 2, 3, 4, backends=("self", "native", "tcp", "mpi", "hosts"))

N_THREADS = 4
ROUNDS = 30


def values(seed, rank, count):
    """Whole numbers, whose sums are exact in float32 in any order; they differ by group, rank and place."""
    return (np.arange(count) % 31 + 100 * seed + 7 * rank).astype("f4")


def total(group, seed, count):
    return sum(values(seed, rank, count) for rank in range(group.size))


def in_every_group(group, use, *, makes_groups=False):
    """Calls `use(part, number)` in `N_THREADS` threads of each rank, each with a group of all ranks of its own.

    Where messages go through MPI, groups of one world are made by one thread after the other.
    """
    parts = [group.split(0, key=group.rank) for _ in range(N_THREADS)]
    calls = [functools.partial(use, part, number) for number, part in enumerate(parts)]
    for together in [[call] for call in calls] if makes_groups and group.transport == "mpi" else [calls]:
        run_at_once(together)
    for part in parts:
        part.close()
    assert_same(
        group.allreduce(np.ones(3)), np.full(3, float(group.size))
    )  # they had no part in each other's end


@pytest.mark.parametrize("count", [1, 2, 5, 3000, 100_003])  # 8 bytes; the header; shared memory; segments
def test_blocking_and_pending_reductions(group, count):
    def use(part, number):
        for i in range(ROUNDS if count < 100_000 else 5):
            seed = number * ROUNDS + i
            x = values(seed, part.rank, count)
            assert part.allreduce(x) is x
            assert_same(x, total(part, seed, count))
            mine = [values(seed + k, part.rank, count) for k in range(3)]
            works = [part.iallreduce(y) for y in mine]
            for k, work in reversed(list(enumerate(works))):
                assert_same(work.wait(), total(part, seed + k, count))

    in_every_group(group, use)


def test_movement_and_messages(group):
    def use(part, number):
        after, before = (part.rank + 1) % part.size, (part.rank - 1) % part.size
        for i in range(ROUNDS):
            seed = number * ROUNDS + i
            gathered = part.allgather(values(seed, part.rank, 5))
            assert_same(gathered, np.stack([values(seed, r, 5) for r in range(part.size)]))
            root = i % part.size
            assert_same(part.bcast(values(seed, part.rank, 4), root), values(seed, root, 4))
            got = np.empty(6, "f4")
            if part.size > 1:
                assert part.sendrecv(values(seed, part.rank, 6), after, got, before).source == before
                assert_same(got, values(seed, before, 6))
            sent = part.isend(values(seed, part.rank, 20_000), after, tag=i)
            got = np.empty(20_000, "f4")
            status = part.recv(got, before, i)
            assert (status.source, status.tag, status.count) == (before, i, 20_000)
            assert_same(got, values(seed, before, 20_000))
            sent.wait()
            assert part.allgather_object((number, i)) == [(number, i)] * part.size

    in_every_group(group, use)


def test_trees(group):
    shapes = {"w": 1000, "b": [7, (3, 200_000)], "empty": 0}

    def tree(seed, rank):
        def of(node):
            if isinstance(node, dict):
                return {name: of(child) for name, child in node.items()}
            return values(seed, rank, node) if isinstance(node, int) else type(node)(map(of, node))

        return of(shapes)

    def leaves(node):
        if isinstance(node, np.ndarray):
            return [node]
        return [
            leaf for child in (node.values() if isinstance(node, dict) else node) for leaf in leaves(child)
        ]

    def use(part, number):
        for i in range(ROUNDS // 3):
            seed = number * ROUNDS + i
            reduced = ss.allreduce_tree(part, tree(seed, part.rank), "sum")
            everyone = [leaves(tree(seed, r)) for r in range(part.size)]
            for got, parts in zip(leaves(reduced), zip(*everyone, strict=True), strict=True):
                assert_same(got, sum(parts))
            same = ss.synchronize(part, tree(seed, part.rank), root=i % part.size)
            for got, expected in zip(leaves(same), everyone[i % part.size], strict=True):
                assert_same(got, expected)

    in_every_group(group, use)


def test_views_of_one_array(group):
    shared = values(1, group.rank, 60_000).reshape(N_THREADS, 3, -1)
    read_only = shared.copy()
    read_only.flags.writeable = False

    def use(part, number):
        for _ in range(ROUNDS):
            part.allreduce(shared[number])  # a part of memory that other threads use
            part.allreduce(shared[number], "max")  # the same on all ranks by now
            strided = read_only[:, :, ::2]  # all threads read all of it
            out = np.empty(strided.shape, "f4")
            assert part.allreduce(strided, out=out) is out
            assert_same(out.reshape(-1), total(group, 1, 60_000)[::2])
            shared[number] = read_only[number]

    in_every_group(group, use)
    assert_same(shared, read_only)


def test_groups_that_threads_make_and_close(group):
    # Each thread has a parent of its own, of the same ranks in another order: so other ranks own what a host shares.
    def use(part, number):
        for i in range(5):
            made = part.split(0, key=(part.rank + number) % part.size)
            small = part.group([part.rank])
            x = values(i, made.rank, 11)
            assert_same(made.allreduce(x), total(made, i, 11))
            assert made.allgather_object((number, i)) == [(number, i)] * part.size
            assert_same(small.allreduce(np.ones(2)), np.ones(2))
            made.close()
            small.close()
            assert made.closed

    in_every_group(group, use, makes_groups=True)


def test_calls_of_one_group_take_turns(group):
    """Calls that match in any order: the group makes them one at a time, and each gets its whole result."""
    fused = fusion.fused(group)

    def whole():
        for _ in range(ROUNDS):
            assert_same(group.allreduce(np.ones(1)), np.full(1, float(group.size)))

    def packed():
        for _ in range(ROUNDS):
            tree = {"a": np.full(3000, group.rank + 1.0), "b": np.full(3000, 10.0 * (group.rank + 1))}
            fused.allreduce(_core.fast_tree(tree), ss.SUM.value, 1.0, group.timeout)
            ranks = group.size * (group.size + 1) / 2
            assert_same(tree["a"], np.full(3000, ranks))
            assert_same(tree["b"], np.full(3000, 10 * ranks))

    run_at_once([whole] * N_THREADS)
    run_at_once([packed] * N_THREADS)


def test_threads_wait_for_one_operation(group):
    count = 300_000
    for i in range(ROUNDS):
        x = np.zeros(2 * count, "f4")
        x[::2] = values(i, group.rank, count)
        work = group.iallreduce(x[::2])  # a copy, whose elements the end stores in `x`
        expected = total(group, i, count)

        def wait(work=work, x=x, expected=expected):
            result = work.wait()
            assert_same(x[::2], expected)
            assert work.done()
            assert work.exception() is None
            return result

        results = run_at_once([wait] * N_THREADS)
        assert all(result is results[0] for result in results)


def test_threads_wait_for_one_result_that_is_assembled_once(group):
    """The average is divided where the result is assembled: twice would be wrong."""
    count = 200_000
    for _ in range(ROUNDS):
        arrays = [np.full(count, 8.0), np.full(count, 4.0)]
        work = dist.all_reduce_multigpu(arrays, "avg", async_op=True)
        run_at_once([work.wait] * N_THREADS)
        for x in arrays:
            assert_same(x, np.full(count, 6.0))


def test_threads_cancel_one_receive(group):
    for _ in range(ROUNDS):
        work = group.irecv(np.empty(3), ss.ANY, 5)
        assert run_at_once([work._inner.cancel] * N_THREADS) == [True] * N_THREADS
    group.barrier()


def test_threads_close_one_group(group):
    for _ in range(5):
        parts = [group.split(0) for _ in range(3)]
        run_at_once([part.close for part in parts for _ in range(2)])
        assert all(part.closed and part not in group._children for part in parts)

"""Who is written, who is returned, who is left alone: the rules that the seeds' backends disagreed on."""

import numpy as np
import pytest
from reference import OPS, assert_same, reduced, values

pytestmark = pytest.mark.ranks(1, 2, 3)


def test_the_world_knows_itself(group):
    assert 0 <= group.rank < group.size


def test_bcast_of_ones_into_another_array_reaches_every_rank_and_root(group):
    send = np.ones(512) if group.rank == 0 else np.zeros(512)
    before, out = send.copy(), np.full(512, -1.0)
    assert group.bcast(send, root=0, out=out) is out
    assert_same(out, np.ones(512))
    assert_same(send, before)


def test_bcast_of_ones_in_place(group):
    x = np.ones(512) if group.rank == 0 else np.zeros(512)
    assert group.bcast(x) is x
    assert_same(x, np.ones(512))


@pytest.mark.parametrize("root", [0, -1])
def test_bcast_writes_out_at_root_whatever_root(group, root):
    root %= group.size
    send, out = np.full(7, float(group.rank)), np.full(7, -1.0)
    group.bcast(send, root=root, out=out)
    assert_same(out, np.full(7, float(root)))


@pytest.mark.parametrize(("op", "factor"), [("sum", 1.0), ("avg", None)])
def test_reduce_and_allreduce_of_ranks(group, op, factor):
    n = group.size
    expected = np.full(512, n * (n + 1) / 2 * (factor or 1 / n))
    send, out = np.full(512, group.rank + 1.0), np.zeros(512)

    group.reduce(send, op, root=0, out=out)
    np.testing.assert_allclose(out, expected if group.rank == 0 else 0)
    x = send.copy()
    group.reduce(x, op, root=0)
    np.testing.assert_allclose(x, expected if group.rank == 0 else send)

    out[:] = 0
    assert group.allreduce(send, op, out=out) is out
    np.testing.assert_allclose(out, expected)
    assert_same(send, np.full(512, group.rank + 1.0))
    x = send.copy()
    assert group.allreduce(x, op) is x
    np.testing.assert_allclose(x, expected)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("two_buffers", [False, True])
def test_reduce_leaves_every_buffer_of_the_other_ranks(group, op, two_buffers):
    for root in range(group.size):
        x = values(group.rank, 33, "int32")
        out = np.full(33, 77, "int32")
        group.reduce(x, op, root=root, out=out if two_buffers else None)
        if group.rank != root:
            assert_same(x, values(group.rank, 33, "int32"))
            assert_same(out, np.full(33, 77, "int32"))


def test_non_blocking_allreduce_and_bcast(group):
    x = np.full(128, 2.0)
    assert group.iallreduce(x).wait() is x
    assert_same(x, np.full(128, 2.0 * group.size))
    y = np.ones(128)
    group.iallreduce(y, "prod").wait()
    assert_same(y, np.ones(128))
    z = np.ones(128) if group.rank == 0 else np.zeros(128)
    assert group.ibcast(z).wait() is z
    assert_same(z, np.ones(128))


def test_every_rooted_operation_at_every_root(group):
    n, rank = group.size, group.rank
    blocks = [values(r, (n, 3), "float64") for r in range(n)]
    for root in range(n):
        x = blocks[rank].copy()
        group.bcast(x, root=root)
        assert_same(x, blocks[root])
        got = group.gather(blocks[rank], root=root)
        assert got is None if rank != root else np.array_equal(got, np.stack(blocks))
        mine = np.empty(3)
        assert group.scatter(blocks[rank] if rank == root else None, root=root, out=mine) is mine
        assert_same(mine, blocks[root][rank])
        y = blocks[rank].copy()
        group.reduce(y, root=root)
        assert_same(y, reduced(blocks, "sum") if rank == root else blocks[rank])


def test_the_input_is_left_where_out_is_given(group):
    n = group.size
    x = values(group.rank, (n, 4), "float32")
    before = x.copy()
    group.allreduce(x, out=np.empty_like(x))
    group.bcast(x, out=np.empty_like(x))
    group.allgather(x, out=np.empty((n, n, 4), "float32"))
    group.alltoall(x, out=np.empty_like(x))
    group.reduce_scatter(x, out=np.empty(4, "float32"))
    group.reduce(x, out=np.empty_like(x))
    assert_same(x, before)


def test_out_may_be_the_input_itself(group):
    x = np.full(5, 1.0)
    assert group.allreduce(x, out=x) is x
    assert_same(x, np.full(5, float(group.size)))


@pytest.mark.parametrize("count", [4, 600, 300_000])
@pytest.mark.parametrize("shift", [0, 1, 3, -2])
@pytest.mark.parametrize("shared", [False, True])
def test_out_may_share_memory_with_the_input(group, count, shift, shared):
    n, rank = group.size, group.rank
    first, wide = count, count * n
    all_values = [values(r, count * (n + 2), "float64") for r in range(n)]
    memory = group.empty(count * (n + 2), "float64") if shared else np.empty(count * (n + 2))

    def at(x, length, by=0):
        return x[first + by : first + by + length]

    def blocks(x):
        return at(x, wide).reshape(n, count)

    def check(verb, got, expected):
        assert np.array_equal(got, expected), verb

    def fresh():
        group.barrier()
        memory[:] = all_values[rank]

    ones, out = at(memory, count), at(memory, count, shift)
    sums = reduced([at(x, count) for x in all_values], "sum")
    for verb in (group.allreduce, lambda *a, **to: group.iallreduce(*a, **to).wait()):
        fresh()
        check("allreduce", verb(ones, out=out), sums)
    fresh()
    group.reduce(ones, root=n - 1, out=out)
    check("reduce", out, sums if rank == n - 1 else at(all_values[rank], count, shift))
    fresh()
    group.bcast(ones, out=out)
    check("bcast", out, at(all_values[0], count))
    fresh()
    group.sendrecv(ones, (rank + 1) % n, out, (rank - 1) % n)
    check("sendrecv", out, at(all_values[rank - 1], count))
    fresh()
    group.reduce_scatter(blocks(memory), out=out)
    check("reduce_scatter", out, reduced([blocks(x) for x in all_values], "sum")[rank])
    fresh()
    group.scatter(blocks(memory) if rank == 0 else None, out=out)
    check("scatter", out, blocks(all_values[0])[rank])
    fresh()
    group.scatterv(at(memory, wide) if rank == 0 else None, [count] * n if rank == 0 else None, out=out)
    check("scatterv", out, blocks(all_values[0])[rank])
    gathered = np.stack([at(x, count, shift) for x in all_values])
    for verb in (group.allgather, group.gather):
        fresh()
        got = verb(out, out=blocks(memory) if rank == 0 or verb == group.allgather else None)
        assert got is None or np.array_equal(got, gathered)
    for verb in (group.allgatherv, group.gatherv):
        fresh()
        got = verb(out, out=at(memory, wide) if rank == 0 or verb == group.allgatherv else None)
        assert got is None or np.array_equal(got, gathered.ravel())
    turned = np.stack([blocks(x)[rank] for x in all_values])
    fresh()
    check("alltoall", group.alltoall(blocks(memory), out=at(memory, wide, shift).reshape(n, count)), turned)
    fresh()
    check(
        "alltoallv",
        group.alltoallv(at(memory, wide), [count] * n, out=at(memory, wide, shift))[0],
        turned.ravel(),
    )


def test_scalars_give_scalars(group):
    n = group.size
    assert group.allreduce(group.rank + 1) == n * (n + 1) // 2
    assert group.allreduce(0.5, "prod") == 0.5**n
    assert group.allreduce(group.rank == 0, "lor") == True  # noqa: E712
    assert group.allreduce(np.float32(1.5)) == 1.5 * n
    assert group.bcast(group.rank + 7, root=n - 1) == n + 6


def test_operations_on_nothing(group):
    n = group.size
    empty = np.empty(0, "float32")
    assert group.allreduce(empty) is empty
    assert group.bcast(empty) is empty
    assert group.allgather(empty).shape == (n, 0)
    assert group.alltoall(np.empty((n, 0))).shape == (n, 0)
    assert group.reduce_scatter(np.empty((n, 0))).shape == (0,)
    group.barrier()

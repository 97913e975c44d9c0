"""bcast, gather, scatter, allgather, alltoall and their variable-length forms: bytes arrive as they were."""

import numpy as np
import pytest
from reference import BIG_SIZE, MOVABLE, SIZES, SMALL_SIZES, assert_same, values

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def inputs_of(group, shape, name="float32", seed=0):
    return [values(rank, shape, name, seed=seed) for rank in range(group.size)]


def rows_of(rank, seed=0):
    """Ragged lengths, an empty one among them."""
    return [2, 0, 5, 1][(rank + seed) % 4]


@pytest.mark.parametrize("name", MOVABLE)
def test_every_dtype(group, name):
    n, rank = group.size, group.rank
    for count in SMALL_SIZES:
        blocks = inputs_of(group, (n, count), name, seed=count)
        mine = blocks[rank]
        for root in range(n):
            x = mine.copy()
            assert group.bcast(x, root=root) is x
            assert_same(x, blocks[root], f"bcast of {count}")
            got = group.gather(mine, root=root)
            if rank == root:
                assert_same(got, np.stack(blocks), f"gather of {count}")
            else:
                assert got is None
            got = group.scatter(mine if rank == root else None, root=root)
            assert_same(got, blocks[root][rank], f"scatter of {count}")
        assert_same(group.allgather(mine), np.stack(blocks), f"allgather of {count}")
        assert_same(group.alltoall(mine), np.stack([b[rank] for b in blocks]), f"alltoall of {count}")
        assert_same(mine, values(rank, (n, count), name, seed=count), "the input")


@pytest.mark.parametrize("name", MOVABLE)
def test_every_dtype_in_ragged_forms(group, name):
    n, rank = group.size, group.rank
    rows = [rows_of(r) for r in range(n)]
    parts = [values(r, (rows[r], 3), name) for r in range(n)]
    joined = np.concatenate(parts)
    assert_same(group.allgatherv(parts[rank]), joined, "allgatherv")
    for root in range(n):
        got = group.gatherv(parts[rank], root=root)
        if rank == root:
            assert_same(got, joined, "gatherv")
        else:
            assert got is None
        got = group.scatterv(joined, rows, root=root) if rank == root else group.scatterv(root=root)
        assert_same(got, parts[rank], "scatterv")
    counts = [[rows_of(source + dest, 1) for dest in range(n)] for source in range(n)]
    sent = [values(r, (sum(counts[r]), 2), name, seed=1) for r in range(n)]
    got, received = group.alltoallv(sent[rank], counts[rank])
    assert list(received) == [counts[source][rank] for source in range(n)]
    starts = [sum(counts[source][:rank]) for source in range(n)]
    expected = [sent[s][starts[s] : starts[s] + counts[s][rank]] for s in range(n)]
    assert_same(got, np.concatenate(expected), "alltoallv")


@pytest.mark.parametrize("count", SIZES)
def test_every_size(group, count):
    n, rank = group.size, group.rank
    whole = inputs_of(group, count)
    x = whole[rank].copy()
    group.bcast(x, root=n - 1)
    assert_same(x, whole[n - 1])
    assert_same(group.allgather(whole[rank]), np.stack(whole))
    got = group.gather(whole[rank], root=n - 1)
    if rank == n - 1:
        assert_same(got, np.stack(whole))
    each = min(count, BIG_SIZE // n)
    blocks = inputs_of(group, (n, each), seed=1)
    assert_same(group.scatter(blocks[rank] if rank == n - 1 else None, root=n - 1), blocks[n - 1][rank])
    assert_same(group.alltoall(blocks[rank]), np.stack([b[rank] for b in blocks]))


def test_ragged_forms_of_many_rows(group):
    n, rank = group.size, group.rank
    rows = [BIG_SIZE // n // (1 + r) for r in range(n)]
    parts = [values(r, rows[r], "float64") for r in range(n)]
    assert_same(group.allgatherv(parts[rank]), np.concatenate(parts))
    got = group.scatterv(np.concatenate(parts), rows, root=0) if rank == 0 else group.scatterv(root=0)
    assert_same(got, parts[rank])


def test_into_out(group):
    n, rank = group.size, group.rank
    root = n - 1
    blocks = inputs_of(group, (n, 4))
    mine = blocks[rank]
    stacked = np.stack(blocks)
    out = np.empty_like(stacked)
    assert group.allgather(mine, out=out) is out
    assert_same(out, stacked)
    out = np.zeros_like(stacked)
    assert group.gather(mine, root=root, out=out if rank == root else None) is (out if rank == root else None)
    assert_same(out, stacked if rank == root else np.zeros_like(stacked))
    out = np.empty(4, "float32")
    assert group.scatter(mine if rank == root else None, root=root, out=out) is out
    assert_same(out, blocks[root][rank])
    out = np.empty_like(mine)
    assert group.alltoall(mine, out=out) is out
    assert_same(out, np.stack([b[rank] for b in blocks]))


def test_ragged_forms_into_out(group):
    n, rank = group.size, group.rank
    root = n - 1
    rows = [rows_of(r) for r in range(n)]
    parts = [values(r, (rows[r], 3), "int16") for r in range(n)]
    joined = np.concatenate(parts)
    out = np.empty_like(joined)
    assert group.allgatherv(parts[rank], out=out) is out
    assert_same(out, joined)
    out = np.empty_like(parts[rank])
    at_root = (joined, rows) if rank == root else ()
    assert group.scatterv(*at_root, root=root, out=out) is out
    assert_same(out, parts[rank])
    out = np.zeros_like(joined)
    group.gatherv(parts[rank], root=root, out=out if rank == root else None)
    assert_same(out, joined if rank == root else np.zeros_like(joined))


def test_one_rank_has_everything(group):
    n, rank = group.size, group.rank
    part = values(rank, 100 if rank == n - 1 else 0, "float32")
    assert_same(group.allgatherv(part), values(n - 1, 100, "float32"))
    got, received = group.alltoallv(part, [100 if rank == n - 1 and dest == 0 else 0 for dest in range(n)])
    assert_same(got, values(n - 1, 100 if rank == 0 else 0, "float32"))
    assert list(received) == [100 if rank == 0 and source == n - 1 else 0 for source in range(n)]


def test_alltoall_of_several_rows_for_each_rank(group):
    n, rank = group.size, group.rank
    inputs = inputs_of(group, (3 * n, 2))
    expected = np.concatenate([a[3 * rank : 3 * rank + 3] for a in inputs])
    assert_same(group.alltoall(inputs[rank]), expected)


def test_nan_payloads_and_negative_zeros_travel_unchanged(group):
    bits = np.array([0x7FC01234, 0xFFC00001, 0x80000000, 0x7F800001], "uint32")
    x = bits.view("float32").copy() if group.rank == 0 else np.zeros(4, "float32")
    group.bcast(x)
    assert_same(x.view("uint32"), bits)


@pytest.mark.parametrize("count", [9_217, 16_384, 100_003])  # long between two ranks; many windows
def test_one_size_again_and_again(group, count):
    # Paths are tried in turn before one is kept: the bytes are the same by each.
    n, rank = group.size, group.rank
    for turn in range(10):
        root = turn % n
        blocks = inputs_of(group, (n, count), seed=turn)
        x = blocks[rank].copy()
        group.bcast(x, root=root)
        assert_same(x, blocks[root], f"bcast {turn}")
        mine = blocks[rank][0]
        everyone = np.stack([b[0] for b in blocks])
        assert_same(group.allgather(mine), everyone, f"allgather {turn}")
        assert_same(group.alltoall(blocks[rank]), np.stack([b[rank] for b in blocks]), f"alltoall {turn}")
        assert_same(group.scatter(blocks[rank] if rank == root else None, root=root), blocks[root][rank])
        got = group.gather(mine, root=root)
        if rank == root:
            assert_same(got, everyone, f"gather {turn}")

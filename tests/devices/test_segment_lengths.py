"""Through the host with the default settings: arrays at the borders at which their division changes."""

import fake_arrays
import numpy as np
import pytest
import samestep as ss

KIB, MIB = 1 << 10, 1 << 20
BORDERS = (1, 256 * KIB + 1, MIB, MIB + 333)
MORE = (
    0,
    256 * KIB - 1,
    256 * KIB,
    512 * KIB,
    MIB - 1,
    4 * MIB - 1,
    4 * MIB + 1,
    16 * MIB + 1,
    17 * MIB + 3,
)
ranks = pytest.mark.ranks(1, 2, 3, backends=["staged-default"])
borders = pytest.mark.parametrize(
    "nbytes", [*BORDERS, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)]
)


def row(rank, n):
    """Bytes of another period than any segment."""
    return np.resize((np.arange(251 * 241) % 251 + 7 * rank).astype("uint8"), n)


def on_device(values):
    return fake_arrays.Array.of(values, fake_arrays.Stream())


@ranks
@borders
def test_reductions_and_broadcasts(group, nbytes):
    n, rank, root = group.size, group.rank, group.size - 1
    total = sum(row(r, nbytes) for r in range(n))  # modulo 256, as the group's
    x, out = on_device(row(rank, nbytes)), on_device(np.zeros(nbytes, "uint8"))
    group.allreduce(x, "sum", out=out)
    np.testing.assert_array_equal(out.get(), total)
    group.reduce(x, "sum", root=root, out=out if rank == root else None)
    np.testing.assert_array_equal(out.get(), total)
    group.allreduce(x, "sum")
    np.testing.assert_array_equal(x.get(), total)
    y = on_device(row(rank, nbytes))
    group.bcast(y, root)
    np.testing.assert_array_equal(y.get(), row(root, nbytes))


@ranks
@borders
def test_blocks_that_are_as_long_together(group, nbytes):
    n, rank, root = group.size, group.rank, group.size - 1
    count = nbytes // n
    of_all = [np.stack([row(r + 3 * k, count) for k in range(n)]) for r in range(n)]
    firsts = np.stack([of_all[r][0] for r in range(n)])
    first, mine = on_device(of_all[rank][0]), on_device(of_all[rank])
    whole, part = on_device(np.zeros((n, count), "uint8")), on_device(np.zeros(count, "uint8"))
    group.reduce_scatter(mine, "sum", out=part)
    np.testing.assert_array_equal(part.get(), sum(of_all[r][rank] for r in range(n)))
    group.allgather(first, out=whole)
    np.testing.assert_array_equal(whole.get(), firsts)
    group.alltoall(mine, out=whole)
    np.testing.assert_array_equal(whole.get(), np.stack([of_all[r][rank] for r in range(n)]))
    group.scatter(mine if rank == root else None, root=root, out=part)
    np.testing.assert_array_equal(part.get(), of_all[root][rank])
    group.gather(first, root=root, out=whole if rank == root else None)
    if rank == root:
        np.testing.assert_array_equal(whole.get(), firsts)


@ranks
@borders
def test_blocks_of_different_lengths(group, nbytes):
    """The first rank has one byte, the last one most of them."""
    n, rank, root = group.size, group.rank, group.size - 1
    lengths = [min(r + 1, nbytes) for r in range(n - 1)]
    lengths.append(nbytes - min(sum(lengths), nbytes))
    joined = np.concatenate([row(r, lengths[r]) for r in range(n)])
    mine, whole = on_device(row(rank, lengths[rank])), on_device(np.zeros_like(joined))
    group.allgatherv(mine, out=whole)
    np.testing.assert_array_equal(whole.get(), joined)
    group.gatherv(mine, root, out=whole if rank == root else None)
    np.testing.assert_array_equal(whole.get(), joined)
    part = on_device(np.zeros(lengths[rank], "uint8"))
    group.scatterv(*(whole, lengths) if rank == root else (None, None), root, out=part)
    np.testing.assert_array_equal(part.get(), row(rank, lengths[rank]))
    sent = [[row(r + 3 * k, lengths[(r + k) % n]) for k in range(n)] for r in range(n)]
    expected = np.concatenate([sent[r][rank] for r in range(n)])
    out = on_device(np.zeros_like(expected))
    group.alltoallv(
        on_device(np.concatenate(sent[rank])), [lengths[(rank + k) % n] for k in range(n)], out=out
    )
    np.testing.assert_array_equal(out.get(), expected)


@pytest.mark.ranks(2, 3, backends=["staged-default"])
@borders
def test_messages(group, nbytes):
    n, rank = group.size, group.rank
    x, out = on_device(row(rank, nbytes)), on_device(np.zeros(nbytes, "uint8"))
    group.sendrecv(x, (rank + 1) % n, out, (rank - 1) % n)
    np.testing.assert_array_equal(out.get(), row((rank - 1) % n, nbytes))


@pytest.mark.ranks(2, 3, backends=["staged-default"])
@pytest.mark.parametrize("nbytes", [512 * KIB - 1, 16 * MIB])
def test_ranks_that_divide_differently_disagree(group, nbytes):
    """Their first segments differ, too: nothing is combined, and no rank waits for another."""
    part = group.split(0)
    mine = on_device(row(group.rank, nbytes + (group.rank == 0)))
    with pytest.raises(ss.MismatchError, match="shape"):
        part.allreduce(mine, "max")

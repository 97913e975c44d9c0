"""Transfers longer than one message may be: cut into pieces, here tiny ones, nothing may change."""

import os

import numpy as np
import pytest
import samestep as ss
from reference import assert_same, reduced, values

COUNTS = [1, 249, 250, 251, 1000, 30_011]
PIECE = 1000  # bytes


@pytest.mark.ranks(2, 3, fresh=True)
@pytest.mark.parametrize("windows", [False, True], ids=["messages", "windows too"])
def test_all_verbs_in_pieces(ranks, windows):
    os.environ["SAMESTEP_MPI_MAX_MESSAGE"] = str(PIECE)
    if windows:
        os.environ["SAMESTEP_SEGMENT_BYTES"] = "512"
    with ss.initialize(ss.MPIBackend, timeout=60) as world:
        n, rank = world.size, world.rank
        assert n == ranks
        for count in COUNTS:
            blocks = [values(r, (n, count), "float32") for r in range(n)]
            x = blocks[rank].copy()
            assert_same(world.allreduce(x), reduced(blocks, "sum"), f"allreduce of {count}")
            assert_same(world.bcast(blocks[rank].copy(), root=n - 1), blocks[n - 1], "bcast")
            assert_same(world.allgather(blocks[rank]), np.stack(blocks), "allgather")
            assert_same(world.alltoall(blocks[rank]), np.stack([b[rank] for b in blocks]), "alltoall")
            assert_same(world.reduce_scatter(blocks[rank]), reduced(blocks, "sum")[rank], "reduce_scatter")
            assert_same(world.scatter(blocks[rank] if rank == 0 else None), blocks[0][rank], "scatter")
            got = world.gather(blocks[rank], root=n - 1)
            assert got is None if rank < n - 1 else np.array_equal(got, np.stack(blocks))
            out = np.empty_like(x)
            world.sendrecv(blocks[rank], (rank + 1) % n, out, (rank - 1) % n)
            assert_same(out, blocks[(rank - 1) % n], "sendrecv")
            works = [world.isend(np.full(count, float(i)), (rank + 1) % n, 3) for i in range(3)]
            for i in range(3):
                out = np.empty(count)
                world.recv(out, tag=3)
                assert_same(out, np.full(count, float(i)), "order of messages in pieces")
            for work in works:
                work.wait()
            assert world.allgather_object(bytes(count)) == [bytes(count)] * n


@pytest.mark.ranks(2, fresh=True)
def test_a_length_that_is_none(ranks):
    os.environ["SAMESTEP_MPI_MAX_MESSAGE"] = "long"
    with pytest.raises(ss.InvalidArgumentError, match=r"SAMESTEP_MPI_MAX_MESSAGE.*'long' on rank 0"):
        ss.initialize(ss.MPIBackend)

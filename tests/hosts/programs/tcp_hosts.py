"""Programs of test_tcp_hosts.py: NativeBackend over two hosts."""

import hashlib
import json
import sys

import numpy as np
import samestep as ss
from host_rank import report, report_error


def use_each_operation(by_host):
    """`by_host`: whether `node` and `cross` are used, which are split from the world otherwise."""
    world = ss.initialize("native", timeout=60)
    rank, n = world.rank, world.size
    bits = hashlib.sha256()

    def note(result):
        bits.update(np.ascontiguousarray(result).tobytes())

    def check(count):
        def mine(seed=0):
            return np.random.default_rng(100 * seed + rank).standard_normal(count).astype("f4")

        for op in ("sum", "max", ss.AVG):
            note(world.allreduce(mine(), op))
        total = world.reduce(mine(1), "sum", root=2)
        note(world.bcast(total if rank == 2 else mine(2), root=2))
        note(world.allgather(mine(3)))
        blocks = np.concatenate([np.random.default_rng(r).standard_normal(count) for r in range(n)])
        note(world.bcast(blocks * (rank + 1), root=0))
        note(world.allgather(world.reduce_scatter(blocks.reshape(n, -1) * (rank + 1))))
        note(world.allgather(world.alltoall(blocks.reshape(n, -1) * (rank + 1))))
        gathered = world.gather(mine(4), root=1)
        scattered = world.scatter(gathered if rank == 1 else None, root=1, out=np.empty(count, "f4"))
        assert (scattered == mine(4)).all()
        received = np.empty(count, "f4")
        world.sendrecv(mine(5), (rank + 1) % n, received, (rank - 1) % n)
        note(world.allgather(received))

    for count in (1, 5, 1000, 100_003, 700_003):
        check(count)
    note(world.split(rank % 2).allreduce(np.full(3, rank, "f4")))
    assert world.allgather_object(rank) == list(range(n))
    place = (world.local_rank, world.local_size, world.node_rank, world.node_count)
    note((world.node if by_host else world.split(rank // 2)).allreduce(np.ones(3)))
    note((world.cross if by_host else world.split(rank % 2)).allreduce(np.ones(3)))
    world.barrier()
    transport = world.transport
    ss.finalize()
    report(bits=bits.hexdigest() if rank % 2 == 0 else "", transport=transport, place=place)


def reduce_once():
    world = ss.initialize("native", timeout=60)
    total = world.allreduce(np.full(100_000, world.rank + 1.0))[7]
    report(total=total, transport=world.transport)
    ss.finalize()


def reduce_under_srun():
    world = ss.initialize("native", init_method="env://", timeout=60)
    report(total=world.allreduce(np.full(3, world.rank + 1.0))[0], local=world.local_rank)
    ss.finalize()


def name_a_wrong_interface():
    report_error(ValueError, lambda: ss.initialize("native", timeout=60))


def name_an_interface_that_leads_nowhere():
    report_error(ss.UnavailableError, lambda: ss.initialize("native", timeout=60))


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

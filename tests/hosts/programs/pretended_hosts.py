"""The program of test_pretended_hosts.py: `pretended_hosts.py backend hosts count`; rank r is on host hosts[r]."""

import hashlib
import json
import os
import sys

import numpy as np
import samestep as ss


def main(backend, hosts, count):
    rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    os.environ["SAMESTEP_HOST_ID"] = hosts[rank]
    world = ss.initialize(backend, timeout=60)
    n = world.size
    bits, exact = hashlib.sha256(), hashlib.sha256()

    def mine(count, seed=0):
        return np.random.default_rng(100 * seed + rank).standard_normal(count).astype("f4")

    def in_shared_memory(x):
        y = world.empty(x.shape, x.dtype)
        y[...] = x
        return y

    for length in (5, 3000, count):
        for at in (np.copy, in_shared_memory):
            for op in ("sum", ss.AVG, ss.premul(rank + 0.3)):
                bits.update(world.allreduce(at(mine(length)), op))
            bits.update(world.allreduce(at(mine(length).astype("f2"))))
            bits.update(world.bcast(world.reduce(at(mine(length, 1)), "sum", root=n - 1), root=n - 1))
            bits.update(world.reduce_scatter(at(np.tile(mine(length, 2), (n, 1)))))
            exact.update(world.allreduce(at(mine(length)), "max"))
            exact.update(world.allreduce(at((mine(length) * 100).astype("i4")), ss.AVG))
            exact.update(world.allgather(at(mine(length, 3))))
            exact.update(world.bcast(at(mine(length, 4)), root=1))
    summed = hashlib.sha256(world.allreduce(mine(count)))
    hashes = {"bits": bits, "exact": exact, "summed": summed}
    found = {"transport": world.transport, **{name: each.hexdigest() for name, each in hashes.items()}}
    print(json.dumps(found), flush=True)
    ss.finalize()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

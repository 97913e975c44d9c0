"""Random sums over shards. With the argument `by-rank`, step 1 depends on the number of ranks."""

import sys

import numpy as np
import samestep as ss

by_rank = "by-rank" in sys.argv
with ss.initialize() as backend:
    total = ss.Accumulator(backend, shards=4)
    for step in range(3):
        for shard in total.indices:
            seed = [step, backend.size if by_rank and step == 1 else 0, shard]
            rng = np.random.default_rng(seed)
            total.add({"v": np.ones(3), "w": rng.standard_normal(5)}, shard=shard)
        total.mean()

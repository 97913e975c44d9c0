"""Prints who this rank is, and the sum over the ranks of their numbers from 1."""

import json
import os

import numpy as np
import samestep as ss

world = ss.initialize(timeout=60)
total = float(world.allreduce(np.full(1000, world.rank + 1.0))[7])
found = {
    "rank": world.rank,
    "host": os.uname().nodename.partition(".")[0],
    "node": world.node_rank,
    "total": total,
}
os.write(1, (json.dumps(found) + "\n").encode())  # at once: several ranks may write to one pipe
ss.finalize()

"""Save and log on one rank, and let the others wait for it where they need the file.

samestep run -n 2 examples/recipes/rank_0.py
"""

import os
from pathlib import Path

import numpy as np
import samestep as ss

MODEL = Path("model.npz")

with ss.initialize() as backend:
    weights = ss.synchronize(backend, np.full(3, backend.rank + 1.0))
    norm = backend.allreduce(np.sum(weights**2), "avg")  # collectives stand outside of `if backend.rank == 0`
    if backend.rank == 0:
        with open("model.new", "wb") as file:
            np.savez(file, weights=weights)
        os.replace("model.new", MODEL)
        print(f"norm {norm:.1f}, saved {MODEL}")
    backend.barrier(timeout=1800)  # only if the others read the file; as long as the slowest save may take
    if backend.node_count == 1 and MODEL.exists():  # other hosts may not see the file
        assert np.array_equal(np.load(MODEL)["weights"], weights)
    ss.println(backend, "ready")  # one line of each rank, in order

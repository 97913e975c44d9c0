"""The installed package works: one sum over all ranks."""

import numpy as np
import samestep as ss

backend = ss.initialize()
total = backend.allreduce(np.full(3, backend.rank + 1.0))
assert (total == backend.size * (backend.size + 1) / 2).all(), total
backend.println("sum over", backend.size, "ranks:", total)
ss.finalize()

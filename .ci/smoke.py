"""The installed package works: one sum over all ranks, and one in each of two threads, with the GIL or without."""

import sys
import sysconfig
import threading

import numpy as np
import samestep as ss

backend = ss.initialize()
total = backend.allreduce(np.full(3, backend.rank + 1.0))
assert (total == backend.size * (backend.size + 1) / 2).all(), total
backend.println("sum over", backend.size, "ranks:", total)


def add(group: ss.Backend, sums: list[float]) -> None:
    """A sum in a group of the thread's own."""
    sums.append(float(group.allreduce(np.ones(1))[0]))


sums: list[float] = []
threads = [threading.Thread(target=add, args=(backend.split(0), sums)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sums == 2 * [backend.size], sums
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    # An extension that does not declare that it can do without the GIL turns it on: neither this one nor mpi4py did.
    assert not sys._is_gil_enabled()
ss.finalize()

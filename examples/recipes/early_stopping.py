"""Stop early, all ranks after the same epoch: decide from a number that is the same on all ranks.

samestep run -n 2 examples/recipes/early_stopping.py
"""

import time

import numpy as np
import samestep as ss

PATIENCE = 3
DEADLINE = time.monotonic() + 60  # each rank has its own clock

rng = np.random.default_rng(0)
x = rng.standard_normal((90, 8))
y = x[:, 0] + rng.standard_normal(90)  # mostly noise: too many steps fit it

with ss.initialize() as backend:
    train = np.array(ss.DistributedDataContainer(backend, np.arange(30)))
    test = np.array(ss.DistributedDataContainer(backend, np.arange(30, 90)))
    weights, best, bad, epoch = np.zeros(8), np.inf, 0, 0
    while epoch < 1000:
        epoch += 1
        gradient = x[train].T @ (x[train] @ weights - y[train]) / len(train)
        weights = weights - 0.1 * ss.allreduce_gradients(backend, gradient, weight=len(train))
        squares = (x[test] @ weights - y[test]) ** 2
        loss = ss.metric_mean(backend, {"loss": (squares.sum(), len(test))})["loss"]  # of all ranks

        best, bad = (loss, 0) if loss < best else (best, bad + 1)
        if bad == PATIENCE:  # the same bits on all ranks, so the same decision
            break
        if backend.any(time.monotonic() > DEADLINE):  # clocks differ: if one rank is late, all leave
            break
    backend.same(epoch)  # raises an error on all ranks if one has left earlier
    if backend.rank == 0:
        print(f"all ranks stop after {epoch} epochs, best loss {best:.4f}")

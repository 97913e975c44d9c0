"""Accumulate the gradients of several micro-batches of unequal length, and communicate once in each step.

samestep run -n 2 examples/recipes/accumulate.py
"""

import numpy as np
import samestep as ss

x = np.random.default_rng(0).standard_normal((100, 2))
y = x @ [1.0, 2.0]


def gradient(weights, items):
    return x[items].T @ (x[items] @ weights - y[items]) / len(items)


with ss.initialize() as backend:
    mine = np.array(ss.DistributedDataContainer(backend, np.arange(len(y))))  # this rank's rows
    total = ss.Accumulator(backend)
    weights = np.zeros(2)
    for _step in range(50):
        for items in np.array_split(mine, 4):  # what fits into memory
            total.add(gradient(weights, items), weight=len(items))  # no communication
        mean = total.mean()  # over all items of all ranks
        np.testing.assert_allclose(mean, gradient(weights, np.arange(len(y))), rtol=1e-9, atol=1e-12)
        weights = weights - 0.5 * mean
    if backend.rank == 0:
        print(f"weights {weights.round(3)}: each step had the gradient of all {len(y)} items")

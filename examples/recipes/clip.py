"""Clip the mean gradient by its global norm: average first, clip then, on every rank alike.

samestep run -n 2 examples/recipes/clip.py
"""

import numpy as np
import samestep as ss

LIMIT = 1.0


def clip(grads, limit):
    norm = np.sqrt(sum(np.sum(g * g) for g in grads.values()))
    scale = min(1.0, limit / (norm + 1e-12))
    return {name: scale * g for name, g in grads.items()}, norm


with ss.initialize() as backend:
    x = np.array(ss.DistributedDataContainer(backend, np.linspace(-1, 1, 60)))
    y = 3 + 20 * x
    params = {"slope": np.zeros(1), "intercept": np.zeros(1)}
    for step in range(200):
        error = params["slope"] * x + params["intercept"] - y
        grads = {"slope": np.mean(error * x, keepdims=True), "intercept": np.mean(error, keepdims=True)}
        grads = ss.allreduce_gradients(backend, grads)  # the mean; from here on equal on all ranks
        grads, norm = clip(grads, LIMIT)
        if step == 0 and backend.rank == 0:
            print(f"norm {norm:.2f} is clipped to {LIMIT}")
        params = {name: params[name] - 0.5 * grads[name] for name in params}
    backend.same(params)  # raises an error on all ranks if any bit differs
    if backend.rank == 0:
        print(f"slope {params['slope'][0]:.2f}, intercept {params['intercept'][0]:.2f}")

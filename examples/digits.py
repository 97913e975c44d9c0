"""Train a small NumPy network on handwritten digits, on any number of ranks.

    pip install ".[demo]"
    samestep run -n 4 examples/digits.py        # or: mpirun -n 4 python examples/digits.py

Every step has 64 images in 8 shards. Ranks compute the gradients of their shards, and the mean has the same
bits on any number of ranks: the hash at the end is the same for -n 1, 2, 3 and 4. The script checks that all
ranks hold the same bits, and trains once more on one rank to compare. Rank 0 saves the curves of loss and
accuracy as digits.png.
"""

import matplotlib
import numpy as np
import samestep as ss
from sklearn.datasets import load_digits
from tqdm import tqdm

EPOCHS = 30
BATCH = 64  # images in one step, over all ranks
SHARDS = 8  # of a step: chosen once, whatever the number of ranks is
TRAIN = 1437  # the other 360 of the 1797 images are for the test


class Momentum:
    """Gradient descent with momentum in the protocol of optax: `init` and `update`."""

    def __init__(self, learning_rate=0.1, decay=0.9):
        self.learning_rate, self.decay = learning_rate, decay

    def init(self, params):
        return {name: np.zeros_like(p) for name, p in params.items()}

    def update(self, grads, velocity, params=None):
        velocity = {name: self.decay * velocity[name] + g for name, g in grads.items()}
        return {name: -self.learning_rate * v for name, v in velocity.items()}, velocity


def new_params(rng):
    w1, w2 = (rng.standard_normal(shape, "f4") / 8 for shape in [(64, 64), (64, 10)])
    return {"w1": w1, "b1": np.zeros(64, "f4"), "w2": w2, "b2": np.zeros(10, "f4")}


def forward(params, x):
    hidden = np.tanh(x @ params["w1"] + params["b1"])
    return hidden, hidden @ params["w2"] + params["b2"]


def loss_and_gradients(params, x, y):
    """The mean cross entropy of a batch, and its derivative by every parameter."""
    hidden, logits = forward(params, x)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(p[rows, y]).mean()
    p[rows, y] -= 1
    d_out = p / np.float32(len(y))
    d_hidden = d_out @ params["w2"].T * (1 - hidden**2)
    return loss, {"w1": x.T @ d_hidden, "b1": d_hidden.sum(0), "w2": hidden.T @ d_out, "b2": d_out.sum(0)}


def train(backend, params, data, epochs):
    """Yields parameters and mean loss after each epoch."""
    (x, y), optimizer = data, Momentum()
    state = optimizer.init(params)
    sampler = ss.DistributedSampler(backend, TRAIN, batch_size=BATCH, shards=SHARDS, seed=1, mode="drop")
    total = ss.Accumulator(backend, SHARDS)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        losses = []
        for shards in sampler.steps():
            for shard in shards:
                loss, grads = loss_and_gradients(params, x[shard.items], y[shard.items])
                total.add({"grads": grads, "loss": loss}, shard=shard.index, weight=len(shard))
            mean = total.mean()
            updates, state = optimizer.update(mean["grads"], state, params)
            params = {name: params[name] + updates[name] for name in params}
            losses.append(mean["loss"])
        yield params, np.mean(losses)


def plot(curves):
    matplotlib.use("Agg")  # draws into a file, needs no screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for i, (name, color) in enumerate([("training loss", "C0"), ("test accuracy", "C2")]):
        axes[i].plot(range(1, len(curves) + 1), [point[i] for point in curves], color)
        axes[i].set(xlabel="epoch", ylabel=name)
        axes[i].grid(alpha=0.3)
    axes[0].set_yscale("log")
    figure.savefig("digits.png", dpi=120)


def main(backend):
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = digits.data[order].astype("f4") / 16, digits.target[order]

    start = ss.synchronize(backend, new_params(np.random.default_rng(backend.rank)))
    test = list(ss.DistributedDataContainer(backend, range(TRAIN, len(y))))  # this rank's part of the test
    bar = tqdm(range(EPOCHS), disable=backend.rank != 0)
    curves = []
    for params, loss in train(backend, start, (x, y), bar):
        hits = np.sum(forward(params, x[test])[1].argmax(axis=1) == y[test])
        curves.append((loss, backend.allreduce(hits) / (len(y) - TRAIN)))
        bar.set_postfix_str("loss {:.4f}, test accuracy {:.4f}".format(*curves[-1]))

    digest = backend.same(params)  # raises an error on all ranks if any bit differs
    if backend.rank == 0:
        *_, (alone, _) = train(backend.group([0]), start, (x, y), range(EPOCHS))
        difference = max(np.abs(alone[name] - params[name]).max() for name in params)
        plot(curves)
        print(f"ranks {backend.size}, test accuracy {curves[-1][1]:.4f}, curves in digits.png")
        print("weights bitwise equal on all ranks: True")
        print(f"largest difference from one process on the joined batches: {difference:.1e}")
        print(f"hash of the weights: {digest}")


with ss.initialize() as world:
    main(world)

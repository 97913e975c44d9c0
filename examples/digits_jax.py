"""The digits example with JAX and optax.

    pip install ".[demo,jax]"
    samestep run -n 4 examples/digits_jax.py

`DistributedOptimizer` returns an optax transformation whose `update` averages the gradients over all
ranks first. Loss and gradients are compiled; `update` is called outside of `jit`. The end of the script
checks that all ranks hold the same bits and agree with a run of one process on the joined batches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import samestep as ss
from sklearn.datasets import load_digits
from tqdm import tqdm

EPOCHS = 30
BATCH = 64  # images in one step, over all ranks
TRAIN = 1437  # the other 360 of the 1797 images are for the test
SGD = optax.sgd(0.1, momentum=0.9)


def new_params(key):
    keys = jax.random.split(key)
    return [
        {"w": jax.random.normal(k, shape) / 8, "b": jnp.zeros(shape[1])}
        for k, shape in zip(keys, [(64, 64), (64, 10)], strict=True)
    ]


def forward(params, x):
    hidden = jnp.tanh(x @ params[0]["w"] + params[0]["b"])
    return hidden @ params[1]["w"] + params[1]["b"]


@jax.jit
@jax.value_and_grad
def loss_and_gradients(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), y).mean()


apply_updates = jax.jit(optax.apply_updates)


def train(params, state, optimizer, data, batches):
    """One step for each row of indices in `batches`; returns new parameters and state, and the mean loss."""
    (x, y), losses = data, []
    for batch in batches:
        loss, grads = loss_and_gradients(params, x[batch], y[batch])
        updates, state = optimizer.update(grads, state, params)
        params = apply_updates(params, updates)
        losses.append(loss)
    return params, state, np.mean(losses)


def main(backend):
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = digits.data[order].astype("f4") / 16, digits.target[order]

    start = params = ss.synchronize(backend, new_params(jax.random.key(backend.rank)))
    optimizer = ss.DistributedOptimizer(backend, SGD)
    state = ss.synchronize(backend, optimizer.init(params))
    sampler = ss.DistributedSampler(backend, range(TRAIN), seed=1)
    test = list(ss.DistributedDataContainer(backend, range(TRAIN, len(y))))  # this rank's part of the test
    share = max(1, BATCH // backend.size)

    history = []
    for epoch in (bar := tqdm(range(EPOCHS), disable=backend.rank != 0)):
        sampler.set_epoch(epoch)
        indices = np.array(list(sampler))
        batches = indices[: len(indices) // share * share].reshape(-1, share)
        params, state, loss = train(params, state, optimizer, (x, y), batches)
        loss = backend.allreduce(loss, "avg")
        hits = backend.allreduce(np.sum(forward(params, x[test]).argmax(axis=1) == y[test]))
        accuracy = hits / (len(y) - TRAIN)
        bar.set_postfix_str(f"loss {loss:.4f}, test accuracy {accuracy:.4f}")
        history.append(batches)

    weights = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    equal = len(set(backend.allgather_object(b"".join(w.tobytes() for w in weights)))) == 1
    joined = np.concatenate(backend.allgather(np.concatenate(history)), axis=1)  # one row for each step
    if backend.rank == 0:
        alone, _, _ = train(start, SGD.init(start), SGD, (x, y), joined)
        difference = max(np.abs(a - w).max() for a, w in zip(jax.tree.leaves(alone), weights, strict=True))
        print(f"ranks {backend.size}, test accuracy {accuracy:.4f}")
        print(f"weights bitwise equal on all ranks: {equal}")
        print(f"largest difference from one process on the joined batches: {difference:.1e}")


with ss.initialize() as world:
    main(world)

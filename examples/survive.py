"""Training that goes on when ranks die, with the result of a run without a loss. Needs NumPy only.

    samestep run -n 4 --min-ranks 2 --max-restarts 100 --chaos 2 examples/survive.py

kills a random rank about every two seconds. The hash at the end is that of `python examples/survive.py`.
"""

import hashlib
import time

import numpy as np
import samestep as ss

SHARDS, BATCH, WIDTH, EPOCHS = 8, 64, 32, 20

backend = ss.initialize()
draw = np.random.RandomState(0)
x = draw.uniform(-3, 3, (2000, 1))
y = np.sin(2 * x)
params = {
    "w": draw.standard_normal((1, WIDTH)),
    "b": np.zeros(WIDTH),
    "v": 0.1 * draw.standard_normal((WIDTH, 1)),
}


def gradients(p, x, y):
    """Of the mean squared error of a network with one hidden layer."""
    hidden = np.tanh(x @ p["w"] + p["b"])
    error = 2 * (hidden @ p["v"] - y) / len(x)
    into = (error @ p["v"].T) * (1 - hidden**2)
    return {"w": x.T @ into, "b": into.sum(0), "v": hidden.T @ error}


sampler = ss.DistributedSampler(backend, len(x), batch_size=BATCH, shards=SHARDS, seed=1)
total = ss.Accumulator(backend, shards=SHARDS)
state = ss.TrainState(backend, params=params, sampler=sampler)

for step in state.steps(
    epochs=EPOCHS
):  # after a loss the same step comes again, divided among those that are left
    with step:
        for shard in step:
            grads = gradients(state.params, x[shard.items], y[shard.items]) if len(shard) else None
            total.add(grads, shard=shard.index, weight=len(shard))
            time.sleep(0.002)  # a model that takes its time
        mean = total.mean()
        state.params = {name: p - 0.05 * mean[name] for name, p in state.params.items()}

if backend.rank == 0:
    digest = hashlib.sha256(b"".join(p.tobytes() for p in state.params.values())).hexdigest()[:32]
    print(f"steps: {state.step}, ranks at the end: {backend.size}, hash of the parameters: {digest}")

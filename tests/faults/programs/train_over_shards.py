"""Trains over shards: `train_over_shards.py checkpoint n_epochs dies_at [shards]`. Prints a SHA-256 of the parameters.

Goes on from the checkpoint if there is one. The last rank kills itself after `dies_at` steps, if that is not 0. A step
has 16 items in 8 shards, or as many as are given; the last one of an epoch has 5 items, so that shards of it are empty.
"""

import hashlib
import os
import pickle
import signal
import sys

import numpy as np
import samestep as ss

if hosts := os.environ.get("PRETENDED_HOSTS"):  # of each rank
    rank = next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "RANK") if name in os.environ)
    os.environ["SAMESTEP_HOST_ID"] = hosts[int(rank)]

checkpoint, n_epochs, dies_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
n_shards = int(sys.argv[4]) if len(sys.argv) > 4 else 8
rng = np.random.default_rng(7)
x, y = rng.standard_normal((101, 6)).astype("f4"), rng.standard_normal(101).astype("f4")
params = {"w": rng.standard_normal((6, 5)).astype("f4"), "v": rng.standard_normal(5).astype("f4")}


def gradient(x, y):
    hidden = np.tanh(x @ params["w"])
    # Not by @: OpenBLAS 0.3.31 reads unset stack memory for it, and warns if that holds a signalling NaN.
    error = ((hidden * params["v"]).sum(1) - y) / np.float32(max(1, len(y)))
    return {"w": x.T @ (np.outer(error, params["v"]) * (1 - hidden**2)), "v": hidden.T @ error}


with ss.initialize() as backend:
    sampler = ss.DistributedSampler(backend, 101, batch_size=16, shards=n_shards, seed=3)
    total = ss.Accumulator(backend, n_shards)
    n_steps = first = 0
    if os.path.exists(checkpoint):
        with open(checkpoint, "rb") as file:
            params, first, n_steps, states = pickle.load(file)
        sampler.load_state_dict(states[0])
        total.load_state_dict(states[1])
    for epoch in range(first, n_epochs):
        sampler.set_epoch(epoch)
        for shards in sampler.steps():
            for shard in shards:
                noise = np.random.default_rng(shard.seed).standard_normal(5).astype("f4")
                grads = gradient(x[shard.items], y[shard.items])
                grads["v"] += np.float32(0.01) * noise
                total.add(grads, shard=shard.index, weight=len(shard))
            mean = total.mean()
            params = {name: params[name] - np.float32(0.1) * mean[name] for name in params}
            n_steps += 1
            if backend.rank == 0:
                with open(checkpoint + ".new", "wb") as file:
                    states = sampler.state_dict(), total.state_dict()
                    pickle.dump((params, epoch, n_steps, states), file)
                os.replace(checkpoint + ".new", checkpoint)
            if n_steps == dies_at and backend.rank == backend.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    backend.same(params)
    digest = hashlib.sha256(params["w"].tobytes() + params["v"].tobytes()).hexdigest()
    if backend.rank == 0:
        print(f"sha256 {digest} after {n_steps} steps of {backend.size} ranks", flush=True)

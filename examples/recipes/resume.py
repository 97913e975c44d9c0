"""Save a checkpoint every few steps; started again, on any number of ranks, continue from it with the same bits.

samestep run -n 2 examples/recipes/resume.py --stop 7    # as if it were killed after step 7
samestep run -n 3 examples/recipes/resume.py             # continues from step 5
"""

import argparse
import pickle
import sys
from pathlib import Path

import numpy as np
import samestep as ss

EPOCHS, EVERY = 4, 5
CHECKPOINT = Path("checkpoint.pickle")

parser = argparse.ArgumentParser()
parser.add_argument("--stop", type=int)
stop = parser.parse_args().stop

x = np.random.default_rng(0).standard_normal((64, 2))
y = x @ [1.0, 2.0]


def gradient(weights, items):
    return x[items].T @ (x[items] @ weights - y[items]) / len(items)


def save(state):
    """Rank 0 calls this. The name always belongs to a complete file, even if the job is killed meanwhile."""
    new = CHECKPOINT.with_suffix(".new")
    new.write_bytes(pickle.dumps(state))
    new.replace(CHECKPOINT)


with ss.initialize() as backend:
    sampler = ss.DistributedSampler(backend, len(y), batch_size=16, shards=8, seed=1)
    total = ss.Accumulator(backend, shards=8)
    step, weights, velocity = 0, np.zeros(2), np.zeros(2)

    # Rank 0 reads: the other hosts need no such file, and all ranks get the same answer if there is none.
    found = backend.rank == 0 and CHECKPOINT.exists()
    state = backend.bcast_object(pickle.loads(CHECKPOINT.read_bytes()) if found else None)
    if state is not None:
        step, weights, velocity = state["step"], state["weights"], state["velocity"]
        sampler.load_state_dict(state["sampler"])
        ss.println(backend, "continues from step", step)

    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)  # an epoch that was loaded continues where it was saved
        for shards in sampler.steps():
            for shard in shards:
                total.add(gradient(weights, shard.items), shard=shard.index, weight=len(shard))
            velocity = 0.5 * velocity + total.mean()
            weights = weights - 0.2 * velocity
            step += 1
            if step % EVERY == 0 and backend.rank == 0:
                position = sampler.state_dict()
                save({"step": step, "weights": weights, "velocity": velocity, "sampler": position})
            if step == stop:
                sys.exit()
    hash_of_weights = backend.same(weights)  # collective
    if backend.rank == 0:
        print(f"step {step}, weights {weights.round(3)}, hash {hash_of_weights}")

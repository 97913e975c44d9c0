"""Choose batch size and learning rate by the number of ranks.

samestep run -n 2 examples/recipes/learning_rate.py --keep batch    # the same training, sooner
samestep run -n 2 examples/recipes/learning_rate.py --keep share    # larger steps, and fewer
"""

import argparse

import numpy as np
import samestep as ss

BATCH, RATE, WARMUP = 24, 0.1, 5  # tuned on one process

parser = argparse.ArgumentParser()
parser.add_argument("--keep", choices=["batch", "share"], default="batch")
keep = parser.parse_args().keep

x = np.random.default_rng(0).standard_normal((480, 2))
y = x @ [1.0, 2.0]

with ss.initialize() as backend:
    if keep == "batch":  # the batch over all ranks stays, and so does the rate
        share, rate = BATCH // backend.size, RATE
    else:  # the batch of each rank stays: the rate grows with the batch over all ranks, after a warm-up
        share, rate = BATCH, RATE * backend.size
    sampler = ss.DistributedSampler(backend, len(y), seed=1, mode="drop")
    weights, step = np.zeros(2), 0
    for epoch in range(5):
        sampler.set_epoch(epoch)
        order = np.array(list(sampler))
        for items in np.split(order[: len(order) // share * share], len(order) // share):
            gradient = x[items].T @ (x[items] @ weights - y[items]) / share
            step += 1
            warm = min(1, step / WARMUP) if keep == "share" else 1
            weights -= warm * rate * backend.allreduce(gradient, "avg")
    assert np.abs(weights - [1, 2]).max() < 0.05
    if backend.rank == 0:
        print(f"ranks {backend.size}, batch {share * backend.size}, rate {rate:.2f}, steps {step}")

"""A script as one wrote it for torch.distributed in 2019, with two imports changed and NumPy for torch.

    python examples/spawn_2019.py

Three ranks, started by `spawn`, fit a line to their own parts of the data with mean gradients.
"""

import tempfile

import numpy as np
import samestep.distributed as dist  # was: import torch.distributed as dist
import samestep.multiprocessing as mp  # was: import torch.multiprocessing as mp

STEPS, RATE = 200, 0.5


def average(gradient):
    dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
    gradient /= dist.get_world_size()


def train(rank, world_size, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    rng = np.random.default_rng(rank)
    x = np.stack([rng.uniform(-1, 1, 100), np.ones(100)], axis=1)
    y = x @ np.array([2.0, -1.0]) + rng.normal(0, 0.01, 100)

    weights = rng.normal(size=2)  # other ones on each rank, until rank 0's are given to all
    dist.broadcast(weights, src=0)
    for _ in range(STEPS):
        gradient = x.T @ (x @ weights - y) / len(y)
        average(gradient)
        weights -= RATE * gradient

    gathered = [np.empty(2) for _ in range(world_size)]
    dist.all_gather(gathered, weights)
    if rank == 0:
        print(f"slope {weights[0]:.2f}, intercept {weights[1]:.2f}")
        print("bitwise equal on all ranks:", all(np.array_equal(w, weights) for w in gathered))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(3, f"{folder}/meeting"), nprocs=3)

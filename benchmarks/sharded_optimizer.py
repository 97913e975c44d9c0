"""State and step of a sharded Adam beside the unsharded one: `samestep run -n 4 benchmarks/sharded_optimizer.py`.

Both are the same torch optimizer on the same parameters. Sizes in MB for each rank; times are medians of rounds in
turns, in milliseconds, of the slowest rank, from `step()` (and, unsharded, the allreduce of the gradients before it).
"""

import sys
import time

import numpy as np
import samestep as ss
import torch

ROUNDS = 9


def parameters(millions):
    torch.manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(1000, 1000)) for _ in range(millions)]
    for matrix in matrices:
        matrix.grad = torch.randn(1000, 1000)
    return matrices


def state_mb(opt):
    tensors = [value for entries in opt.state.values() for value in entries.values()]
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor)) / 1e6


def main(backend, millions):
    whole, split = parameters(millions), parameters(millions)
    plain = torch.optim.Adam(whole)
    sharded = ss.ShardedOptimizer(backend, torch.optim.Adam(split))

    def step_plain():
        ss.allreduce_gradients(backend, [p.grad for p in whole])
        plain.step()

    times = {"plain": [], "sharded": []}
    for _ in range(ROUNDS):
        for name, step in (("plain", step_plain), ("sharded", sharded.step)):
            backend.barrier()
            start = time.perf_counter()
            step()
            times[name].append(backend.allreduce(time.perf_counter() - start, "max") * 1e3)
    most = backend.allreduce(state_mb(sharded), "max")
    if backend.rank == 0:
        a, b = (np.median(times[name]) for name in times)
        print(
            f"{millions:3d} M parameters, {backend.size} ranks: state {state_mb(plain):.1f} and {most:.1f} MB, "
            f"step {a:.1f} and {b:.1f} ms, {b / a - 1:+.1%}"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    with ss.initialize() as world:
        for size in map(int, sys.argv[1:] or ["1", "10"]):
            main(world, size)

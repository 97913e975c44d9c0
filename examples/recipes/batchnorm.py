"""BatchNorm with torch: train on the statistics of each rank's batch, and average the running ones before use.

samestep run -n 2 examples/recipes/batchnorm.py
"""

import samestep as ss
import torch
from torch import nn

with ss.initialize() as backend:
    torch.manual_seed(backend.rank)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    model = ss.synchronize(backend, model)
    optimizer = ss.DistributedOptimizer(backend, torch.optim.Adam(model.parameters(), lr=0.01))
    for _step in range(100):
        x = torch.randn(64, 4)
        loss = nn.functional.mse_loss(model(x), x.square().sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    # Parameters are equal on all ranks; running means and variances are of the batches that each rank has seen.
    ss.allreduce_tree(backend, dict(model.named_buffers()), "avg")  # in place
    backend.same(model)  # now all is equal, as a checkpoint and an evaluation need it
    model.eval()
    if backend.rank == 0:
        print(f"equal on all ranks after {int(model[1].num_batches_tracked)} batches, loss {loss.item():.2f}")

"""A script for torch.distributed as it stands anywhere, but for one word: "samestep" where it said "gloo".

samestep run -n 2 examples/ddp_samestep.py
torchrun --nproc-per-node 2 examples/ddp_samestep.py
mpirun -n 2 python examples/ddp_samestep.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("samestep")
torch.manual_seed(0)
x = torch.linspace(-1, 1, 240)[:, None]
data = TensorDataset(x, torch.sin(3 * x))
loader = DataLoader(data, batch_size=20, sampler=DistributedSampler(data))

model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in range(30):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()

mean = loss.detach().clone()
dist.all_reduce(mean, dist.ReduceOp.AVG)
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
gathered = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, weights)
if dist.get_rank() == 0:
    print(f"ranks {dist.get_world_size()}, last loss {mean.item():.5f}")
    print(f"bitwise equal on all ranks: {all(torch.equal(w, weights) for w in gathered)}")
dist.destroy_process_group()

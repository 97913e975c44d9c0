"""Hash of the weights after 20 steps of torch's DistributedDataParallel over gloo, on the same batches of 64 items.

    for n in 1 2 3 4; do samestep run -n $n benchmarks/ddp_bits.py; done

Each rank has 64 / ranks items of a batch, the first ranks one more where that leaves a remainder, as a DataLoader deals
them.
"""

import datetime
import hashlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
x, y = torch.randn(20, 64, 32), torch.randn(20, 64, 1)
for step in range(20):
    mine = torch.arange(64).tensor_split(size)[rank]
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x[step, mine]), y[step, mine]).backward()
    optimizer.step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
if rank == 0:
    print(f"{size} ranks: {digest[:16]}")
dist.destroy_process_group()

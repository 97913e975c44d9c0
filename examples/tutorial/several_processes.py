"""The same on any number of processes, as docs/tutorial.md changes it: `samestep run -n 4 several_processes.py`."""

import samestep as ss
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
backend = ss.initialize()
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))

model = ss.synchronize(backend, nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)))
optimizer = ss.DistributedOptimizer(backend, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
sampler = ss.DistributedSampler(backend, data, seed=0)
loader = DataLoader(data, batch_size=64 // backend.size, sampler=sampler)

for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    ss.println(backend, f"epoch {epoch}: loss {loss.item():.3f}")
if backend.rank == 0:
    torch.save(model.state_dict(), "digits.pt")

"""A program of Accelerate that knows nothing of samestep."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), 1e-3)
rows = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(16, 4) / 64)
data = torch.utils.data.DataLoader(rows, batch_size=2)
model, opt, data = accelerator.prepare(model, opt, data)
for (x,) in data:
    opt.zero_grad()
    loss = (model(x) - 1).square().mean()
    accelerator.backward(loss)
    opt.step()
losses = accelerator.gather(loss.detach().reshape(1))
print("<", accelerator.num_processes, *losses.tolist(), torch.distributed.get_backend(), ">")
accelerator.end_training()

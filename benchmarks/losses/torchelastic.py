"""torchrun: all ranks are ended and started again, and go on from the last checkpoint."""

import os
import sys

import task
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, dies, every = sys.argv[1], sys.argv[2] == "dies", int(sys.argv[3])
checkpoint = os.path.join(folder, "checkpoint")
dist.init_process_group("gloo")
rank = dist.get_rank()
notes = task.Notes(folder, rank, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dies=dies)
x, y = task.data()
model, optimizer = task.made()
finished = 0
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    finished = saved["step"]
wrapped = DistributedDataParallel(model)
for step in range(finished + 1, task.STEPS + 1):
    optimizer.zero_grad()
    items = task.part(step, rank)
    notes.within(step)
    task.backward(wrapped, x[items], y[items])
    optimizer.step()
    if rank == 0 and step % every == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{checkpoint}.new")
        os.replace(f"{checkpoint}.new", checkpoint)
    notes.finished(step)
notes.ended(model)
dist.destroy_process_group()

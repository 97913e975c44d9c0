"""Host-side collectives in a GPU job: tensors go through torch's NCCL, arrays of the host through samestep.

samestep run -n 2 examples/recipes/gpu_host.py      # or: torchrun --nproc-per-node 2 examples/recipes/gpu_host.py
"""

import os

import numpy as np
import samestep as ss
import torch
import torch.distributed as dist

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if on_gpu else "gloo")  # as the job did before

# A world of the same ranks beside torch's group, which takes no device.
with ss.initialize("native", cuda_devices=ss.missing, amdgpu_devices=ss.missing) as host:
    assert (host.rank, host.size) == (dist.get_rank(), dist.get_world_size())
    gradient = torch.full((1000,), host.rank + 1.0, device="cuda" if on_gpu else "cpu")
    pending = dist.all_reduce(gradient, async_op=True)  # on the device, while the host does this:

    seen = host.allreduce(np.array([32, 30 - host.rank]))  # items and hits: no stream waits for them
    config = host.bcast_object({"rate": 0.1} if host.rank == 0 else None)
    stop = host.any(host.rank == 5)  # a signal, a clock, a full disk
    pending.wait()

    assert gradient[0].item() == sum(range(1, host.size + 1))
    if host.rank == 0:
        print(f"{seen[1]} hits in {seen[0]} items, rate {config['rate']}, stop: {stop}")
dist.destroy_process_group()

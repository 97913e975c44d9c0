"""Mixed precision with torch: autocast and a loss scaler see mean gradients, and need no change.

samestep run -n 2 examples/recipes/mixed_precision.py
"""

import samestep as ss
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16 if DEVICE == "cuda" else torch.bfloat16  # bfloat16 could do without the scaler

with ss.initialize("nccl" if DEVICE == "cuda" else None) as backend:
    torch.manual_seed(backend.rank)
    torch.set_num_threads(1)
    model = ss.synchronize(backend, torch.nn.Linear(8, 1).to(DEVICE))  # parameters stay float32
    optimizer = ss.DistributedOptimizer(backend, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
    skipped = 0
    for step in range(100):
        x = torch.randn(32, 8, device=DEVICE)
        y = x.sum(dim=1, keepdim=True)
        if step == 50 and backend.rank == 1:
            x[0, 0] = torch.inf  # the batch of one rank overflows
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=HALF):
            loss = torch.nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()  # the gradients are averaged when this returns
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        before = scaler.get_scale()
        scaler.step(optimizer)  # skips on all ranks: they see the same infinity
        scaler.update()
        skipped += scaler.get_scale() < before
    backend.same(model)  # raises an error on all ranks if any bit differs
    assert skipped == (backend.size > 1)
    error = (model.weight - 1).abs().max().item()
    assert error < 0.1
    if backend.rank == 0:
        print(f"skipped {skipped} step on all ranks, largest error {error:.3f}")

"""`samestep run --min-ranks 1`: those that are left repeat the step."""

import os
import sys

import samestep as ss
import task
import torch

folder, dies = sys.argv[1], sys.argv[2] == "dies"
backend = ss.initialize()
rank, _, life = os.environ.get("SAMESTEP_UID", f"{backend.rank}.0").partition(".")
notes = task.Notes(folder, int(rank), int(life), dies=dies)
x, y = task.data()
model, optimizer = task.made()
sampler = ss.DistributedSampler(backend, len(x), batch_size=task.BATCH, shards=task.SHARDS, shuffle=False)
total = ss.Accumulator(backend, shards=task.SHARDS)
state = ss.TrainState(backend, model=model, optimizer=optimizer, sampler=sampler)
for step in state.steps(epochs=1):
    number = state.step + 1
    with step:
        for shard in step:
            optimizer.zero_grad()
            items = torch.from_numpy(shard.items)
            task.backward(model, x[items], y[items])
            total.add([p.grad for p in model.parameters()], shard=shard.index, weight=len(shard))
        notes.within(number)
        for p, grad in zip(model.parameters(), total.mean(), strict=True):
            p.grad = grad
        optimizer.step()
    if state.step == number:  # else it comes again
        notes.finished(number)
notes.ended(model)

"""torchft: the replicas that are left discard the step, and go on without the samples of the one that is missing.

The driver starts a replica that has died again, and it gets the parameters of another one. As in `train_ddp.py` of
torchft, but the gradients are averaged by `Manager.allreduce`, because in torchft 0.2.0 `DistributedDataParallel` does
not return from a backward pass in which a reduction on the host fails.
"""

import sys
from datetime import timedelta

import task
import torch.distributed as dist
from torchft import Manager, Optimizer
from torchft.process_group import ProcessGroupGloo

folder, dies, replica, life = sys.argv[1], sys.argv[2] == "dies", int(sys.argv[3]), int(sys.argv[4])
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
notes = task.Notes(folder, replica, life, dies=dies)
x, y = task.data()
model, inner = task.made()


def load(state):
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
    min_replica_size=2,
    load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
    replica_id=f"replica_{replica}",
    store_addr="127.0.0.1",
    store_port=store.port,
    rank=0,
    world_size=1,
    hostname="127.0.0.1",
    timeout=timedelta(seconds=20),
)
optimizer = Optimizer(manager, inner)
notes.meet()  # the lighthouse waits for replicas that it knows
while manager.current_step() < task.STEPS:
    step = manager.current_step()
    optimizer.zero_grad()
    items = task.part(step + 1, replica)
    task.backward(model, x[items], y[items])
    if dies and step + 1 == task.AT:
        manager.wait_quorum()  # the others count on this replica in this step
        notes.within(step + 1)
    for work in [manager.allreduce(p.grad) for p in model.parameters()]:
        work.wait()
    optimizer.step()
    notes.finished(manager.current_step(), discarded=manager.current_step() == step)
notes.ended(model)
manager.shutdown(wait=False)

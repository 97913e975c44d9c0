"""Three replicas train under torchft as its `train_ddp.py` does; one is killed within a step, restarted, and heals.

Run without arguments, this starts the lighthouse and the replicas, each a process of its own, and restarts the one
that has died. The others discard the step in which it died, go on without it, and take it in again. All stop at the
same step, `STEPS_TOGETHER` after that, and must have equal parameters and equal states of the optimizer.

torchft's `ProcessGroupGloo` makes the groups; with `SAMESTEP_REPLACE_GLOO=1`, `samestep.torchft.ProcessGroupSamestep`.

In torchft 0.2.0 `DistributedDataParallel` does not return from a backward pass in which a reduction on the host fails:
its hook raises an AssertionError or an AttributeError, over gloo, too. So `train` catches it if the manager knows of an
error, and wraps the model anew.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroup, ProcessGroupGloo

N_REPLICAS = 3
DIES = 1  # this replica,
STEPS_TOGETHER = 4  # after so many steps of all replicas, within the next; and as many follow once it is back
LIMIT_S = 90.0


def make_group() -> ProcessGroup:
    if os.environ.get("SAMESTEP_REPLACE_GLOO", "") in ("", "0"):
        return ProcessGroupGloo(timeout=timedelta(seconds=20))
    from samestep.torchft import ProcessGroupSamestep

    return ProcessGroupSamestep(timeout=timedelta(seconds=20))


def digest(state: object) -> str:
    """Of all tensors and numbers in a state dict."""
    found = hashlib.sha256()

    def add(part: object) -> None:
        if isinstance(part, dict):
            for key in sorted(part, key=str):
                found.update(str(key).encode())
                add(part[key])
        elif isinstance(part, torch.Tensor):
            found.update(part.numpy().tobytes())
        else:
            found.update(str(part).encode())

    add(state)
    return found.hexdigest()


def train(replica: int, life: int) -> dict[str, object]:
    """One replica, to the end. `life`: how often it has been started before."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(100 * life + replica)  # replicas start differently: torchft makes them equal at step 0
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 20))
    inner = torch.optim.AdamW(model.parameters())

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=make_group(),
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
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    first_step, together, lost_one = -1, 0, life > 0
    discarded = []  # the reason, for each step that torchft has not taken
    while not lost_one or together < STEPS_TOGETHER:
        step = manager.current_step()
        inputs = torch.randn(8, 20)
        optimizer.zero_grad()
        loss = (wrapped(inputs) - inputs).square().mean()
        if (replica, life, together) == (DIES, 0, STEPS_TOGETHER):
            manager.wait_quorum()  # the others count on this replica in this step
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            loss.backward()
        except (AssertionError, AttributeError):
            if manager.errored() is None:
                raise
            wrapped = DistributedDataParallel(manager, model)  # the other one is in the middle of its buckets
        optimizer.step()
        if manager.current_step() == step:
            discarded.append(str(manager.errored()).splitlines()[0])
            continue
        if first_step < 0:
            first_step = manager.current_step()
        if manager.num_participants() == N_REPLICAS:
            together += 1
        elif together:
            lost_one, together = True, 0
    ended = {
        "replica": replica,
        "life": life,
        "first_step": first_step,
        "last_step": manager.current_step(),
        "discarded": discarded,
        "parameters": digest(model.state_dict()),
        "optimizer": digest(inner.state_dict()),
    }
    manager.shutdown(wait=False)
    return ended


def start(lighthouse: str, replica: int, life: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, str(replica), str(life)],
        env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse},
        stdout=subprocess.PIPE,
        text=True,
    )


def main() -> None:
    end = time.monotonic() + LIMIT_S
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000, heartbeat_timeout_ms=5_000
    )
    replicas = [start(lighthouse.address(), replica, 0) for replica in range(N_REPLICAS)]
    try:
        killed = replicas[DIES].wait(end - time.monotonic())
        assert killed == -signal.SIGKILL, f"replica {DIES} ended with {killed}"
        replicas[DIES] = start(lighthouse.address(), DIES, 1)
        outputs = [process.communicate(timeout=end - time.monotonic())[0] for process in replicas]
    finally:
        for process in replicas:
            process.kill()
    assert all(process.returncode == 0 for process in replicas), [process.returncode for process in replicas]
    ended = [json.loads(output.splitlines()[-1]) for output in outputs]
    for each in ended:
        print(each)
    for what in ("parameters", "optimizer", "last_step"):
        assert len({each[what] for each in ended}) == 1, f"the replicas differ in {what}"
    assert all(each["discarded"] for each in ended if each["replica"] != DIES), (
        "a replica did not notice the death"
    )
    assert ended[DIES]["first_step"] > STEPS_TOGETHER, "the restarted replica began anew"
    print("equal")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(train(*map(int, sys.argv[1:]))))
    else:
        main()

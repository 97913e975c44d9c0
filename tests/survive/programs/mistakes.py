"""Programs as users write them by mistake, whose ranks are lost at times. See `train`."""

import json
import os
import signal
import sys

import numpy as np
import samestep as ss

UID = os.environ.get("SAMESTEP_UID", "")


def die(uid):
    if uid == UID:
        os.kill(os.getpid(), signal.SIGKILL)


def result(*values):
    if ss.get_distributed_backend().rank == 0:
        print("result", json.dumps(values), flush=True)


def torch_under_other_names():
    import torch

    backend = ss.initialize(timeout=20.0)
    w = torch.full((3,), float(backend.rank), requires_grad=True)
    state = ss.TrainState(backend, params={"w": w})
    result(*(float(x) for x in backend.allreduce(w.detach())), state.params["w"] is w)


def subgroup():
    backend = ss.initialize(timeout=20.0)
    ss.TrainState(backend.group([0, 1]), w=np.zeros(2))


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

"""Random sums over shards: `train_by_shard.py [mode]`. What fails in step 1, or on two ranks, is the mode."""

import os
import signal
import sys
import threading

import numpy as np
import samestep as ss

mode = sys.argv[1] if len(sys.argv) > 1 else ""
with ss.initialize() as backend:
    if mode == "exits":
        sys.exit(3)
    if mode == "has no steps":
        sys.exit(0)
    on_two = backend.size == 2
    total = ss.Accumulator(backend, shards=4)
    own = ss.Accumulator(backend.group([backend.rank]), shards=1)
    for step in range(2 if mode == "fewer steps" and on_two else 3):
        for shard in total.indices:
            seed = [step, backend.size if mode == "by rank" and step == 1 else 0, shard]
            rng = np.random.default_rng(seed)
            grads = {
                "v": np.ones(3, "f4" if mode == "dtype" and on_two else "f8"),
                "w": rng.standard_normal(5),
            }
            if mode == "leaf" and on_two:
                grads["x"] = np.ones(1)
            total.add(grads, shard=shard, weight=2 if mode == "weight" and on_two else 1)
        total.mean()
        own.add([np.ones(2)], shard=0)  # of this rank alone: recorded on rank 0
        own.mean()
        ss.allreduce_gradients(backend, [np.ones(2) / 3], weight=1 + backend.rank)  # not recorded
        if mode == "hangs" and on_two:
            print("so far", flush=True)
            threading.Event().wait()
        if mode == "is killed" and on_two:
            os.kill(os.getpid(), signal.SIGKILL)

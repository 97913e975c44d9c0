"""A small training that is asked to stop, or loses a rank, where the caller says so.

Each rank prints "began" as its first step begins, "saved" with the step as it has written the file, and "ended" with
the step when it stops; and all print the hash of the result.
"""

import json
import os
import signal
import sys
import time

if __name__ == "__main__":
    RANK = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0"))
    if "SURVIVE_HOSTS" in os.environ:  # as many as that, on one machine
        os.environ["SAMESTEP_HOST_ID"] = str(RANK % int(os.environ["SURVIVE_HOSTS"]))

import numpy as np
import samestep as ss

N_ITEMS, N_FEATURES, EPOCHS, PAUSE_S = 200, 6, 4, 0.01


def say(*words):
    os.write(1, f"{' '.join(map(str, words))}\n".encode())  # one system call, whatever ends this process


class Plan:
    """What this rank does to itself: "1@4:mean:SIGTERM" sends that signal to rank 1 in step 4 (*: any), at "mean"."""

    def __init__(self, planned):
        self.mine = []
        for place in planned:
            rank, _, rest = place.partition("@")
            step, where, name = rest.split(":")
            if int(rank) == RANK and os.environ.get("SAMESTEP_UID", "0.0").endswith(
                ".0"
            ):  # in its first life
                self.mine.append((step, where, name))

    def at(self, step, where):
        for one in [one for one in self.mine if one[0] in (str(step), "*") and one[1] == where]:
            self.mine.remove(one)
            say("struck", RANK, *one)
            os.kill(os.getpid(), signal.Signals[one[2]])


def train(path, planned=(), shards=8, leave_at=None, pause=PAUSE_S):
    """`leave_at`: the program leaves the loop of an epoch by `break` after this step."""
    plan, step_now, has_begun = Plan(planned), 0, False
    plan.at(0, "import")

    def saving(event, args):
        if event == "open" and path and str(args[0]).startswith(os.path.dirname(path) + "/.state"):
            plan.at(step_now, "write")
        if event == "os.rename" and args[1] == path:
            plan.at(step_now, "rename")
            say("saved", RANK, step_now)

    sys.addaudithook(saving)
    draw = np.random.RandomState(3)
    x = draw.standard_normal((N_ITEMS, N_FEATURES))
    y = x @ draw.standard_normal(N_FEATURES)
    backend = ss.initialize(timeout=20.0)
    plan.at(0, "initialize")
    sampler = ss.DistributedSampler(backend, N_ITEMS, batch_size=24, shards=shards, seed=1)
    total = ss.Accumulator(backend, shards=shards)
    state = ss.TrainState(backend, w=np.zeros(N_FEATURES), sampler=sampler, save=path or None)
    state.on_change(lambda _: plan.at(state.step + 1, "change"))
    plan.at(0, "made")
    try:
        for epoch in range(EPOCHS):
            for step in state.steps(epochs=epoch + 1):
                step_now = state.step + 1
                if not has_begun:
                    has_begun = True
                    say("began", RANK)
                with step:
                    plan.at(step_now, "begin")
                    for shard in step:
                        error = x[shard.items] @ state.w - y[shard.items]
                        grads = x[shard.items].T @ error / max(1, len(shard))
                        total.add(grads, shard=shard.index, weight=len(shard))
                    time.sleep(pause)
                    plan.at(step_now, "added")
                    mean = total.mean()
                    plan.at(step_now, "mean")
                    state.w = state.w - 0.1 * mean
                    plan.at(step_now, "updated")
                plan.at(step_now, "after")
                step_now = state.step
                if state.step == leave_at:
                    break
            plan.at(epoch + 1, "between")
            time.sleep(pause)  # as a validation would
    except SystemExit as end:
        say("ended", RANK, state.step, end.code)
        raise
    say("result", state.w.tobytes().hex(), state.step, backend.size)


if __name__ == "__main__":
    train(*map(json.loads, sys.argv[1:]))

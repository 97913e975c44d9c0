"""A part of the kit: `kit_survive.py`. Of three ranks that train on a device one is killed, and the result is the same.

Runs itself by `samestep run`, once with one rank, and once with three of which rank 1 is lost in the fifth step.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import device_kinds
import numpy as np
import samestep as ss
from kit_rank import tell

LOST = "1.0@5"
STEPS = 12


def train(lost: str) -> int:
    """Sums and state in device memory; prints the bits of the result, how many ranks are left, and their device."""
    if "NCCL_HOSTID" in os.environ:  # see `sharing_for`
        os.environ["NCCL_HOSTID"] = os.environ["SAMESTEP_UID"]
    arrays = device_kinds.choose()
    x = np.arange(60.0, dtype="float32").reshape(20, 3) % 7
    y = x @ np.array([1, -2, 3], "float32")
    backend = ss.initialize(ss.NCCLBackend, timeout=30.0)
    sampler = ss.DistributedSampler(backend, 20, batch_size=8, shards=4, seed=1)
    total = ss.Accumulator(backend, shards=4)
    # The stand-ins have no pickle.
    keep, kept = (np.array, np.array) if device_kinds.on_fakes() else (arrays.of, arrays.get)
    state = ss.TrainState(backend, w=keep(np.zeros(3, "float32")), sampler=sampler)
    for step in state.steps(steps=STEPS):
        with step:
            w = kept(state.w)
            for shard in step:
                error = x[shard.items] @ w - y[shard.items]
                grad = x[shard.items].T @ error / max(1, len(shard))
                total.add(arrays.of(grad), shard=shard.index, weight=len(shard))
            mean = total.mean()
            ranks = backend.allreduce(arrays.of(np.ones(4, "float32")))  # by NCCL
            if f"{os.environ['SAMESTEP_UID']}@{state.step + 1}" == lost:
                os.kill(os.getpid(), signal.SIGKILL)
            state.w = keep(w - np.float32(0.01) * arrays.get(mean))
    if backend.rank == 0:
        bits = kept(state.w).tobytes().hex()
        print("result", bits, state.step, int(arrays.get(ranks)[0]), backend.kind, flush=True)
    backend.close()
    return 0


def result(n: int, lost: str = "") -> list[str]:
    """What rank 0 prints at the end of a run."""
    command = ["-m", "samestep", "run", "-n", str(n), "--raw", "--min-ranks", "1", __file__, "rank", lost]
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    return line.split()[1:]


def main() -> int:
    alone, left = result(1), result(3, LOST)
    tell(what="survive", alone=alone, left=left)
    return 0 if left == [*alone[:2], "2", "nccl"] and alone[2:] == ["1", "nccl"] else 1


if __name__ == "__main__":
    sys.exit(train(sys.argv[2]) if sys.argv[1:2] == ["rank"] else main())

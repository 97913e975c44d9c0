"""A part of the kit: `kit_lifetimes.py SECONDS`. Ranks that begin and end many times leave nothing behind."""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import Any

import device_kinds
import numpy as np
from kit_rank import start, tell, turns

WARM_UP = 10  # turns in which libraries make what they keep
GROWTH_PER_TURN = 4096  # bytes of the process: less is the allocator's affair
GRANULE = 2 << 20  # bytes: the driver takes memory in such pieces, and keeps one for its own pools


def state(arrays: Any) -> dict[str, int]:
    arrays.synchronize()
    return {
        "device": arrays.used(),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "resident": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def settled(arrays: Any, before: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """The state once threads that are ending have ended, and what has grown."""
    deadline = time.monotonic() + 5
    while True:
        after = state(arrays)
        grown = {name: after[name] - before.get(name, 0) for name in after}
        if grown["threads"] <= 0 or time.monotonic() > deadline:
            return after, grown
        time.sleep(0.02)


def main(seconds: float) -> int:
    arrays = device_kinds.choose()
    n_turns, begin, before, turn = turns(1000, 20), time.monotonic(), {}, 0
    x = arrays.of(np.ones(1000, "float32"))
    for turn in range(1, n_turns + 1):
        with start("nccl", f"turn-{turn}") as backend:
            backend.allreduce(x)
        del backend
        if turn == WARM_UP:
            before = state(arrays)
        if turn >= 2 * WARM_UP and time.monotonic() - begin > seconds:
            break
    after, grown = settled(arrays, before)
    counted = turn - WARM_UP
    each = (time.monotonic() - begin) / turn
    tell(what="lifetimes", turns=turn, wanted=n_turns, seconds_each=each, grown=grown, at_end=after)
    left = (
        grown["device"] > (0 if device_kinds.on_fakes() else GRANULE)
        or grown["threads"] > 0
        or grown["files"] > 0
    )
    return int(left or grown["resident"] > GROWTH_PER_TURN * max(counted, 1000))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))

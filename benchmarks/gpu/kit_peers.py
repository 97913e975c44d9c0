"""Parts of the kit about ranks that fail each other: `kit_peers.py absent|killed|differ`. Each with two ranks.

NCCL has connected the ranks before, so that a kernel of NCCL runs on the device when it is aborted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import device_kinds
import numpy as np
import samestep as ss
from kit_failures import Findings, sums
from kit_rank import RANK, start, turns

COUNT = 1000
SOON_S = 10.0  # for what has to be noticed, or to end
PLACE = Path(os.environ.get("KIT_PLACE", "."))


def connected(timeout: float) -> tuple[Any, Any, Any]:
    """Arrays, a world that has done some operations, and an array."""
    arrays = device_kinds.choose()
    backend = start("nccl", timeout=timeout)
    x = arrays.of(np.zeros(COUNT, "float32"))
    for _ in range(3):
        backend.allreduce(x)
    arrays.synchronize()
    backend.barrier()
    return arrays, backend, x


def fails(found: Findings, kind: type[Exception], act: Callable[[], Any], *words: str) -> float:
    """Expects an error of this kind with these words in it. Returns after how many seconds it came."""
    begin = time.monotonic()
    try:
        act()
        found.expect(False, f"no {kind.__name__}")
    except ss.Error as error:
        found.seen.setdefault("errors", []).append(f"{type(error).__name__}: {error}"[:300])
        found.expect(isinstance(error, kind), f"{type(error).__name__} instead of {kind.__name__}")
        found.expect(all(word in str(error) for word in words), f"the error does not say {words}")
    found.seen["error_after_s"] = round(time.monotonic() - begin, 2)
    return time.monotonic() - begin


def ends(arrays: Any, backend: Any, x: Any, found: Findings) -> None:
    """Expects that the group takes no more, that the device has nothing left to do, and that the world ends."""
    try:
        backend.iallreduce(x).wait(host=True)
        found.expect(False, "the group still works")
    except ss.Error as error:
        found.seen["then"] = type(error).__name__
    begin = time.monotonic()
    arrays.synchronize()
    found.seen["device_idle_after_s"] = round(time.monotonic() - begin, 2)
    ss.finalize()
    found.seen["ended_after_s"] = round(time.monotonic() - begin, 2)
    found.expect(time.monotonic() - begin < SOON_S, "the abort was too slow")


def works_anew(arrays: Any, found: Findings) -> None:
    with start("nccl", "again") as backend:
        sums(arrays, backend, found, "in a new world")


def absent() -> int:
    """Rank 1 does not call: NCCL's kernel on rank 0 waits for it until the timeout, and is aborted."""
    found, timeout = Findings("a rank that does not call"), float(turns(10, 3))
    arrays, backend, x = connected(timeout)
    over = PLACE / "over"
    if RANK == 0:
        begin = time.monotonic()
        work = backend.iallreduce(x)
        work.wait()
        time.sleep(timeout / 3)
        found.expect(not arrays.idle(), "the operation does not wait for the other rank")
        spent = fails(found, ss.TimeoutError, lambda: work.wait(timeout=1.0), "rank 1")
        found.expect(spent < SOON_S / 2, "the error of a wait with a timeout of its own came late")
        fails(found, ss.TimeoutError, lambda: work.wait(host=True), "not all ranks have reached it")
        spent = time.monotonic() - begin
        found.seen["error_after_s"] = round(spent, 2)
        found.expect(0.9 * timeout < spent < timeout + SOON_S / 2, "the error came too early or too late")
        over.touch()
    while not over.exists():  # the part's deadline is there for a rank 0 that never comes
        time.sleep(0.02)
    if RANK == 1:
        # Rank 0 had given NCCL its part before it gave up: where that has arrived, this operation ends well.
        with contextlib.suppress(ss.Error):
            backend.iallreduce(x).wait(host=True)
            found.seen["had_its_result"] = True
    ends(arrays, backend, x, found)
    works_anew(arrays, found)
    return found.finish()


def killed() -> int:
    """Rank 1 dies with its operation behind a kernel that spins, while NCCL's kernel on rank 0 waits for it."""
    found = Findings("a rank that is killed")
    arrays, backend, x = connected(60.0)
    if RANK == 1:
        arrays.busy(20.0)
        backend.iallreduce(x)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    work = backend.iallreduce(x)
    work.wait()
    found.expect(not arrays.idle(), "the operation does not wait for the other rank")
    spent = fails(found, ss.PeerLostError, lambda: work.wait(host=True), "rank 1")
    found.expect(spent < SOON_S, "the error came late")
    ends(arrays, backend, x, found)
    with ss.initialize("nccl", init_method=f"file://{PLACE}/alone", rank=0, world_size=1) as alone:
        sums(arrays, alone, found, "in a world without the dead rank")
    return found.finish()


def differ() -> int:
    """Ranks pass different operators, which NCCL does not notice."""
    found = Findings("ranks that differ")
    arrays, backend, x = connected(60.0)
    op = ("sum", "max")[RANK]
    spent = fails(
        found, ss.MismatchError, lambda: backend.iallreduce(x, op).wait(host=True), "sum", "max", "rank"
    )
    found.expect(spent < SOON_S, "the error came late")
    ends(arrays, backend, x, found)
    works_anew(arrays, found)
    return found.finish()


PARTS: dict[str, Callable[[], int]] = {"absent": absent, "killed": killed, "differ": differ}

if __name__ == "__main__":
    sys.exit(PARTS[sys.argv[1]]())

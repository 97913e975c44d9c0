"""Parts of the kit about failures, and what is unusual: `kit_failures.py PART`. Each with one rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import device_kinds
import numpy as np
import raw_nccl
import samestep as ss
from kit_rank import skip, start, tell, turns

COUNT = 1000
PLACE = Path(os.environ.get("KIT_PLACE", "."))


class Findings:
    """What a part expects, and what was otherwise."""

    def __init__(self, what: str) -> None:
        self.what, self.wrong, self.seen = what, [], {}  # type: str, list[str], dict[str, Any]

    def expect(self, holds: bool, text: str) -> None:
        if not holds:
            self.wrong.append(text)

    def finish(self) -> int:
        tell(what="failures", name=self.what, wrong=self.wrong, seen=self.seen)
        return bool(self.wrong)


def sums(arrays: Any, backend: Any, found: Findings, when: str) -> None:
    """Expects that the group works."""
    x = arrays.of(np.full(COUNT, 3.0, "float32"))
    found.expect(
        bool((arrays.get(backend.allreduce(x)) == 3.0 * backend.size).all()), f"wrong numbers {when}"
    )


def itself() -> int:
    """A send and a receive of one rank: the way of a launch with a kernel, blocking and not, checked and timed."""
    arrays, found = device_kinds.choose(), Findings("a message to itself")
    x, y = arrays.of(np.arange(COUNT).astype("float32")), arrays.of(np.zeros(COUNT, "float32"))
    source, target = device_kinds.address(x), device_kinds.address(y)
    for blocking in (True, False):
        raw = raw_nccl.RawNccl(raw_nccl.find(), blocking=blocking)
        arrays.fill(y, 0.0)
        spent = []
        for _ in range(turns(200, 10)):
            arrays.synchronize()
            begin = time.perf_counter()
            raw.send_to_itself(target, source, COUNT, arrays.stream)
            spent.append(1e6 * (time.perf_counter() - begin))
        arrays.synchronize()
        found.seen["blocking" if blocking else "non-blocking"] = round(float(np.median(spent)), 1)
        found.expect(bool((arrays.get(y) == np.arange(COUNT)).all()), f"wrong numbers, blocking={blocking}")
        raw.close()
    return found.finish()


def missing() -> int:
    """A rank that never comes: NCCL is aborted while it waits for it, and a world of the others works afterwards."""
    arrays, found = device_kinds.choose(), Findings("a missing rank")
    raw = raw_nccl.RawNccl(raw_nccl.find(), size=2, meeting=PLACE / "identity", blocking=False, wait=False)
    time.sleep(1.0)  # NCCL's threads wait for the other rank by now
    begin = time.monotonic()
    raw.abort()
    found.seen["abort_s"] = round(time.monotonic() - begin, 2)
    found.expect(found.seen["abort_s"] < 20, "the abort was too slow")
    begin = time.monotonic()
    try:
        ss.initialize("nccl", init_method=f"file://{PLACE}/two", rank=0, world_size=2, timeout=5)
        found.expect(False, "two ranks have met, of which one does not exist")
    except ss.TimeoutError as error:
        found.seen["error"] = str(error)[:300]
    found.expect(time.monotonic() - begin < 30, "the deadline came late")
    with start("nccl", "one") as backend:
        sums(arrays, backend, found, "after a rank was missing")
    return found.finish()


def late() -> int:
    """A kernel that runs longer than the timeout: a TimeoutError in time, then a new world."""
    arrays, found, busy_s = device_kinds.choose(), Findings("a late device"), turns(12, 4)
    backend = ss.initialize(
        "nccl", init_method=f"file://{PLACE}/late", rank=0, world_size=1, timeout=busy_s / 4
    )
    sums(arrays, backend, found, "at first")
    x = arrays.of(np.ones(COUNT, "float32"))
    arrays.synchronize()
    arrays.busy(busy_s)
    begin = time.monotonic()
    try:
        backend.iallreduce(x).wait(host=True)
        found.expect(False, "no error, though the device is late")
    except ss.TimeoutError as error:
        found.seen["error"] = str(error)[:300]
    found.seen["error_after_s"] = round(time.monotonic() - begin, 2)
    found.expect(not arrays.idle(), "the device had ended when the error came")  # clocks differ, see `busy`
    found.expect(found.seen["error_after_s"] < busy_s / 2, "the error came late")
    arrays.synchronize()  # or `finalize` would say at its deadline that NCCL waits for the device
    ss.finalize()
    with start("nccl", "again") as again:
        sums(arrays, again, found, "in a world after a timeout")
    return found.finish()


def queue() -> int:
    """More operations than a launch queue holds, behind a kernel that spins: none is lost, and nobody gives up."""
    arrays, found, n = device_kinds.choose(), Findings("a full queue"), turns(2000, 200)
    with start("nccl") as backend:
        x = arrays.of(np.ones(COUNT, "float32"))
        backend.allreduce(x)
        arrays.synchronize()
        arrays.busy(3.0)
        begin = time.monotonic()
        for k in range(n):
            arrays.fill(x, float(k))
            backend.iallreduce(x).wait()
        found.seen["calls_s"] = round(time.monotonic() - begin, 2)
        found.expect(bool((arrays.get(x) == n - 1).all()), "wrong numbers")
        sums(arrays, backend, found, "after a full queue")
    return found.finish()


def capture() -> int:
    """CUDA graphs: an operation in a capture is replayed, and one that is pending when a capture begins survives it."""
    arrays, found = device_kinds.choose(), Findings("graph capture")
    if not hasattr(arrays, "captured"):
        skip(f"{arrays.name}: no graphs")
    with start("nccl") as backend:
        x, y, z = (arrays.of(np.full(COUNT, value, "float32")) for value in (1.0, 5.0, 0.0))
        backend.allreduce(x)
        # The first capture loads code, which may end a capture and waits for the device.
        arrays.captured(lambda z: arrays.fill(z, 0.0), z)()
        arrays.synchronize()
        begin = time.monotonic()
        arrays.busy(3.0)
        work = backend.iallreduce(x)
        pending = []

        def beside(z: Any) -> None:
            arrays.fill(z, 2.0)
            time.sleep(0.1)  # the thread that watches operations looks at this one meanwhile
            pending.append(not work.done())

        replay = arrays.captured(beside, z)
        found.seen["captured_after_s"] = round(time.monotonic() - begin, 2)
        found.seen["pending_in_and_after"] = [*pending, not work.done()]
        found.expect(all(pending), "no operation was pending within the capture")
        work.wait(host=True)
        replay()
        found.expect(bool((arrays.get(z) == 2.0).all()), "wrong numbers in a replay beside an operation")
        sums(arrays, backend, found, "after a capture beside an operation")
        replay = arrays.captured(lambda y: (arrays.fill(y, 3.0), backend.iallreduce(y).wait()), y)
        replay()
        found.expect(
            bool((arrays.get(y) == 3.0 * backend.size).all()), "wrong numbers in a replay of an operation"
        )
        sums(arrays, backend, found, "after a replay of an operation")
    return found.finish()


PARTS: dict[str, Callable[[], int]] = {
    "itself": itself,
    "missing": missing,
    "late": late,
    "queue": queue,
    "capture": capture,
}

if __name__ == "__main__":
    sys.exit(PARTS[sys.argv[1]]())

"""Programs of test_asyncio_waits.py: coroutines that stop waiting, and works that a signal interrupts."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import samestep as ss
from native_rank import folder, rank, report, size, start

sys.path.append(str(Path(__file__).parents[2]))
import signals

WAIT_S = 0.3


async def longest_gap(gaps):
    before = time.monotonic()
    while True:
        await asyncio.sleep(0.01)
        gaps.append(time.monotonic() - before)
        before = time.monotonic()


async def wait_in_vain(verb):
    world = start()
    peer, gaps = (rank + 1) % size, []
    clock = asyncio.create_task(longest_gap(gaps))
    began, late = time.monotonic(), False
    work = world.irecv(np.empty(5), peer) if verb == "receive" else world.iallreduce(np.ones(300_000))
    try:
        await asyncio.wait_for(work, WAIT_S)
    except asyncio.TimeoutError:
        late = True
    del work
    seconds = time.monotonic() - began
    await asyncio.sleep(0.1)
    clock.cancel()
    report(late=late, seconds=seconds, gap=max(gaps))
    return world


def give_up_a_receive():
    world = asyncio.run(wait_in_vain("receive"))
    world.barrier()
    out = np.empty(5)
    world.sendrecv(np.full(5, 7.0), (rank + 1) % size, out, (rank + 1) % size)
    report(out=out.tolist(), total=world.allreduce(np.ones(1)).tolist())


def give_up_an_allreduce():
    if rank == 0:
        world = asyncio.run(wait_in_vain("allreduce"))
    else:
        world = start()
        time.sleep(3 * WAIT_S)  # rank 0 gives up meanwhile
        report(first=world.allreduce(np.ones(300_000))[:1].tolist())
    report(total=world.allreduce(np.ones(1)).tolist())


def interrupt_a_dropped_work():
    world = start()
    world.barrier()
    if rank == 0:
        threading.Timer(WAIT_S, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            world.irecv(np.empty(3), 1)
            time.sleep(0)
            report(interrupted=False)
        except KeyboardInterrupt:
            report(interrupted=True)
        world.send(np.ones(1), 1)
    else:
        world.recv(np.empty(1), 0)


def raise_in_a_call(verb):
    """The handler of a signal raises in a call of several operations, which rank 1 makes later."""
    world = start()
    world.barrier()
    calls = {
        "objects": lambda: world.bcast_object("text" if rank == 1 else None, root=1),
        "tree": lambda: world.allreduce_tree({"a": np.ones(3), "b": [np.ones(20_000)]}),
        "lengths": lambda: world.allgatherv(np.ones(3 + rank)),
    }
    raised = Path(folder, "raised")
    while rank == 1 and not raised.exists():
        time.sleep(0.01)
    try:
        with signals.raised_inside() if rank == 0 else contextlib.nullcontext():
            calls[verb]()
        report(error="")
    except Exception as error:
        raised.touch()
        report(error=type(error).__name__)
    try:
        world.allreduce(np.ones(1))
        report(then="")
    except ss.Error as error:
        report(then=type(error).__name__)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

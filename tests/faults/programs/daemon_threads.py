"""Programs of test_daemon_threads.py: threads that are in samestep when the interpreter ends."""

import contextlib
import json
import logging
import os
import sys
import threading
import time

import numpy as np
import samestep as ss
from native_rank import folder, rank, report, size, start

N_CALLS = 20


class Exported:
    """An array of a class written in Python, whose export lets other threads run."""

    def __init__(self):
        self.elements = np.ones(3)

    def __dlpack_device__(self):
        return self.elements.__dlpack_device__()

    def __dlpack__(self, **options):
        time.sleep(1e-4)
        return self.elements.__dlpack__(**options)


def repeat(call):
    with contextlib.suppress(ss.Error):  # the other rank has ended, or this one
        while True:
            call()


def calls_of(group, verb):
    right, left = (rank + 1) % size, (rank - 1) % size
    array = Exported()
    calls = {
        "a small allreduce": lambda: group.allreduce(np.ones(3)),
        "a large allreduce": lambda: group.allreduce(np.ones(200_000)),
        "an array of a class": lambda: group.allreduce(array),
        "a barrier": group.barrier,
        "a broadcast of an object": lambda: group.bcast_object({"rank": rank}),
        "a tree": lambda: group.allreduce_tree({"a": np.ones(3), "b": [np.ones(20_000)]}),
        "messages": lambda: group.sendrecv(np.ones(3), right, np.empty(3), left),
        "a receive": lambda: group.recv(np.empty(3), right),
        "a Work": lambda: group.iallreduce(np.ones(3)).wait(),
        "a dropped Work": lambda: group.iallreduce(np.ones(3)),
        "a group": lambda: group.split(0).close(),
    }
    return calls[verb]


def end_during(*verbs):
    """The main thread ends while daemon threads make these calls, each in a group of its own."""
    world = start()
    # Where the other rank ends first, a dropped Work warns of it, at any time.
    logging.getLogger("samestep").addHandler(logging.NullHandler())
    for verb in verbs:
        call = calls_of(world.split(0), verb)
        threading.Thread(target=repeat, args=(call,), daemon=True).start()
    for _ in range(N_CALLS):
        world.allreduce(np.ones(3))
        time.sleep(1e-3)
    report(ended=True)


def end_before_the_other_looks():
    """Rank 1 ends after an allreduce; rank 0 learns of it in another group, before it looks whether that is done."""
    world = start()
    half = world.split(0)
    if rank == 1:
        report(total=float(world.allreduce(np.ones(3))[0]))
        return
    receiving, reducing = half.irecv(np.empty(3), 1), world.iallreduce(np.ones(3))
    while not os.path.exists(os.path.join(folder, "ended")):
        time.sleep(0.01)
    half._comm.check_peers()
    try:
        receiving.wait()
    except ss.PeerLostError as error:
        report(total=float(reducing.wait()[0]), error=str(error))


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

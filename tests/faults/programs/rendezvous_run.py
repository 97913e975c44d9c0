"""Programs of test_rendezvous_run.py: ranks of `samestep run` that meet."""

import json
import os
import signal
import sys
import threading
import time

import numpy as np
import samestep as ss
from samestep.rendezvous import open_rendezvous

rank = int(os.environ["RANK"])


def exchange_ranks():
    mesh = open_rendezvous(timeout=60)
    received = mesh.allgather_bytes(b"%d" % rank)
    print(json.dumps([x.decode() for x in received] + [os.environ["SAMESTEP_SECRET"]]))
    mesh.close()


def kill_rank_0():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mesh = open_rendezvous(timeout=60)
    if rank == 0:
        mesh.allgather_bytes(b"")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        mesh.allgather_bytes(b"")
        mesh.allgather_bytes(b"")
    except ss.PeerLostError as error:
        print("lost:", error)


def meet_and_wait():
    mesh = open_rendezvous(timeout=60)
    print("ready")
    while not os.path.exists("go"):
        time.sleep(0.01)
    assert mesh.allgather_bytes(b"%d" % rank) == [b"0", b"1"]
    mesh.close()


def _print_error_of(call, kind):
    try:
        call()
    except kind as error:
        print(json.dumps(str(error)))


def meet_on_a_port_in_use():
    _print_error_of(lambda: open_rendezvous(timeout=60), ss.UnavailableError)


def initialize_over_shared_memory_of_two_hosts():
    os.environ["SAMESTEP_HOST_ID"] = str(rank)
    os.environ["SAMESTEP_NATIVE_TRANSPORT"] = "shm"
    _print_error_of(lambda: ss.initialize("native", timeout=60), ss.UnavailableError)


def initialize_with_another(name):
    """`name`: "rank" or "world_size", which the launcher gives too."""
    claim = {"rank": rank + 1} if name == "rank" else {"world_size": 3}
    _print_error_of(lambda: ss.initialize(**claim, timeout=60), ss.InvalidArgumentError)


def initialize_three_times():
    seen = []
    for _ in range(3):
        with ss.initialize(timeout=60) as world:
            total = ss.allreduce(world, np.full(5, world.rank + 1.0))
        seen.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    print(json.dumps([world.kind, total.tolist(), seen[1] == seen[2]]))


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

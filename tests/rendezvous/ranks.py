"""Ranks as threads of the test process, and what they may leave behind."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from samestep.launch import network
from samestep.rendezvous import mesh, rendezvous

PATIENCE_S = 60.0


def on_ranks(n, act):
    """What `act(rank)` returned on each rank, or the exception that ended it."""

    def call(rank):
        try:
            return act(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(call, range(n), timeout=PATIENCE_S))


def held():
    """Descriptors and threads of this process."""
    return sorted(os.listdir("/proc/self/fd")), [t.name for t in threading.enumerate()]


class FreePort:
    """A port that stays free for servers of this process until the end of the block."""

    def __enter__(self):
        self._holder = network.reserve_port()
        return self._holder.getsockname()[1]

    def __exit__(self, *_):
        self._holder.close()


class Room:
    """Where threads exchange what they say, and report failures."""

    def __init__(self, size, between=lambda said: None):
        self.size = size
        self.said = [b""] * size
        self.complaints = [""]
        self.barrier = threading.Barrier(size, action=lambda: between(self.said))

    def rendezvous(self, rank):
        room = self

        class Rendezvous:
            size = room.size
            allgather_json = rendezvous.Rendezvous.allgather_json

            def __init__(self):
                self.rank = rank

            def allgather_bytes(self, mine):
                room.said[rank] = mine
                room.barrier.wait(PATIENCE_S)
                return list(room.said)

            def report_failure(self, text):
                room.complaints[0] = room.complaints[0] or text  # the first one stays

            def failure(self):
                return room.complaints[0]

        return Rendezvous()


def connect(room, rank, address="127.0.0.1", timeout=PATIENCE_S, hindrance=""):
    """The connections of `rank` with all others that meet in the room."""
    names = [f"host{r}" for r in range(room.size)]
    return mesh.connect_all(room.rendezvous(rank), address, names, timeout, hindrance)

"""Ranks as threads of the test process, and what they may leave behind."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from samestep.launch import network

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

"""One rank of `scaling.py measure`: what the first argument names, with the settings of the second, as JSON.

Each rank prints what it has measured, a JSON object in each line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import samestep as ss


class Rank:
    """A rank, and how it measures: `batch_s` seconds of calls at a time."""

    def __init__(self, batch_s: float) -> None:
        self.world = ss.initialize("native", timeout=60)
        self.batch_s = batch_s
        self.word, self.got = np.zeros(1), np.zeros(1)

    def timed(self, act: Callable[[], object], times: int) -> float:
        self.world.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            act()
        return (time.perf_counter() - begin) / times

    def best(self, act: Callable[[], object], batches: int = 7) -> float:
        """Seconds of a call in the best of several batches, as whatever else runs on the machine only adds.

        The first batch uses up what a limiter lets through at once, and calls follow each other without a pause in
        which it could save that up again. How many calls a batch has follows from the quickest of three short ones.
        """
        slowest = lambda: float(self.world.allreduce(np.array([self.timed(act, 3)]), "max")[0])  # noqa: E731
        times = max(1, int(self.batch_s / min(slowest() for _ in range(3))))
        self.timed(act, times)
        return min(self.timed(act, times) for _ in range(batches))

    def shift(self) -> None:
        me, n = self.world.rank, self.world.size
        self.world.sendrecv(self.word, (me + 1) % n, self.got, (me - 1) % n)


def tell(**what: Any) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())  # at once: several ranks may write to one pipe


def pair(rank: Rank, long: int) -> None:
    """On two hosts: seconds of half a round trip, of a message sent and one received among many, of a byte in each
    direction at the same time, and of a byte that is read to be reduced."""
    world, word, got = rank.world, rank.word, rank.got
    other, many = 1 - world.rank, 64
    sent, received = np.zeros(long // 8), np.zeros(long // 8)
    a, b = np.ones(1 << 15, "f4"), np.ones(1 << 15, "f4")

    def there_and_back() -> None:
        if world.rank == 0:
            world.send(word, other)
        world.recv(got, other)
        if world.rank == 1:
            world.send(word, other)

    def flood() -> None:
        works = [world.isend(word, other) for _ in range(many)]
        for _ in range(many):
            world.recv(got, other)
        for work in works:
            work.wait()

    def add() -> None:
        for _ in range(100):
            np.add(a, b, out=a)

    tell(
        half=rank.best(there_and_back) / 2,
        flood=rank.best(flood) / many,
        both_ways=rank.best(lambda: world.sendrecv(sent, other, received, other)) / sent.nbytes,
        reduce=rank.best(add) / 100 / (2 * a.nbytes),
    )


def crowd(rank: Rank) -> None:
    """On more hosts than there are processors: seconds of n - 1 messages of each rank at once, and of one of each."""
    tell(barrier=rank.best(rank.world.barrier), shift=rank.best(rank.shift))


def inside(rank: Rank, long: int) -> None:
    """On one host: seconds of an allreduce."""
    array = np.zeros(long // 4, "f4")
    tell(seconds=rank.best(partial(rank.world.allreduce, array)))


def times(rank: Rank, sizes: Sequence[int], algorithms: Sequence[str]) -> None:
    """Seconds of an allreduce, by algorithm and size in bytes."""
    for algorithm in algorithms:
        rank.world.barrier()
        rank.world._comm.configure(algorithm=algorithm)
        for nbytes in sizes:
            array = np.zeros(nbytes // 4, "f4")
            seconds = rank.best(partial(rank.world.allreduce, array))
            tell(algorithm=algorithm, nbytes=nbytes, seconds=seconds)


def steps(rank: Rank, leaves: Sequence[int]) -> None:
    """Seconds to average the gradients of a model, in the buckets that training makes of them."""
    tree = {str(i): np.zeros(count, "f4") for i, count in enumerate(leaves)}
    step = lambda: ss.allreduce_gradients(rank.world, tree)  # noqa: E731
    step()
    tell(seconds=min(rank.timed(step, 1) for _ in range(3)))


MEASUREMENTS = {act.__name__: act for act in (pair, crowd, inside, times, steps)}


def main(name: str, settings: str) -> None:
    values = json.loads(settings)
    if values.pop("realtime"):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))
    rank = Rank(values.pop("batch_s"))
    MEASUREMENTS[name](rank, **values)
    ss.finalize()


if __name__ == "__main__":
    main(*sys.argv[1:])

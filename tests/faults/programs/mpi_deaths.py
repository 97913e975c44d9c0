"""Programs of test_mpi_deaths.py: a rank dies under a launcher that lets the others go on."""

import json
import os
import resource
import socket
import sys
import time

import numpy as np
import samestep as ss
from samestep import _core


def lose_rank_1(catches, knows=False, source=0):
    world = ss.initialize("mpi", timeout=80)
    world.barrier()
    if world.rank == 1:
        os._exit(0)
    begin = time.time()
    try:
        if world.rank == 2:
            world.recv(np.empty(3), source)  # rank 0 leaves because of the death
        world.barrier()
    except ss.PeerLostError as error:
        print(f"<{world.rank} {time.time() - begin:.1f} {time.time():.1f} {error}>", flush=True)
        if catches:
            assert not knows or _core.has_lost_ranks()
            ss.finalize()
            raise SystemExit(0) from None
        raise RuntimeError("no more training") from error


def lose_rank_1_without_watching(source):
    """Rank 2 watches no other rank, and hears of the death from rank 0 alone."""
    watch = _core.watch_ranks
    _core.watch_ranks = lambda comm, *watched: None if comm.rank == 2 else watch(comm, *watched)
    lose_rank_1(catches=True, knows=True, source=source)


def lose_rank_1_behind_a_full_queue(backlog, n_strangers):
    """Connections of others fill the queue of rank 1, which computes for a while and then dies."""
    from samestep.world import mpi_world

    mpi_world._BACKLOG = backlog
    watch, addresses = _core.watch_ranks, []

    def watch_ranks(comm, listener, reserved, table):
        addresses.extend(table)
        watch(comm, listener, reserved, table)

    _core.watch_ranks = watch_ranks
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    world = ss.initialize("mpi", timeout=60)
    strangers = []
    if world.rank == 0:
        for _ in range(n_strangers):
            strangers.append(socket.socket())
            strangers[-1].setblocking(False)
            strangers[-1].connect_ex(tuple(addresses[1][:2]))
    world.barrier()
    if world.rank == 1:
        end = time.monotonic() + 11  # computes: longer than a host may be silent
        while time.monotonic() < end:
            pass
    assert world.allreduce(1) == world.size
    print("alive", flush=True)
    if world.rank == 1:
        os._exit(0)
    begin = time.monotonic()
    try:
        world.barrier()
    except ss.PeerLostError as error:
        print(f"<{world.rank} {time.monotonic() - begin:.1f} {error}>", flush=True)
    os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

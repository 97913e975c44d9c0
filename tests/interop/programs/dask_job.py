"""What `samestep.dask.run` does on a cluster of three processes; the words name the cases to run. Prints JSON."""

import json
import os
import signal
import sys

import numpy as np
import samestep as ss
import samestep.dask
from distributed import Client, LocalCluster


def total(scale, *, extra=0.0):
    backend = ss.initialize(timeout=60)
    return (
        backend.rank,
        backend.size,
        backend.local_rank,
        float(backend.allreduce(np.full(9, scale))[8]) + extra,
    )


def fails(rank):
    backend = ss.initialize(timeout=60)
    if backend.rank == rank:
        raise ValueError(f"bad batch on rank {rank}")
    backend.allreduce(np.ones(9))


def dies(rank):
    backend = ss.initialize(timeout=60)
    if backend.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    backend.allreduce(np.ones(9))


def error_of(client, function, *arguments):
    try:
        return samestep.dask.run(client, function, *arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main():
    cases = {
        "totals": lambda client: [samestep.dask.run(client, total, 2.0, extra=1.0) for _ in range(2)],
        "one": lambda client: samestep.dask.run(
            client, total, 2.0, workers=list(client.scheduler_info()["workers"])[:1]
        ),
        "unknown": _unknown,
        "fails": lambda client: [error_of(client, fails, 1), samestep.dask.run(client, total, 1.0)],
        "dies": lambda client: error_of(client, dies, 1),
    }
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        print(json.dumps({name: cases[name](client) for name in sys.argv[1:]}), flush=True)


def _unknown(client):
    try:
        samestep.dask.run(client, total, 2.0, workers=["tcp://127.0.0.1:1"])
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    main()

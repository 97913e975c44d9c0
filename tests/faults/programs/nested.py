"""One launcher inside another: prints [rank, size, sum of ones] of each rank of the inner one as a line of JSON."""

import json
import sys

import numpy as np
import samestep as ss


def world(backend=None):
    met = ss.initialize(backend, timeout=60)
    print(json.dumps([met.rank, met.size, float(met.allreduce(np.ones(1))[0])]), flush=True)
    met.barrier()


def launch(n):
    ss.launch(print_world, n)


def print_world():
    met = ss.initialize(timeout=60)
    found = [met.rank, met.size, float(met.allreduce(np.ones(1))[0])]
    print(json.dumps(found), flush=True)


def spawn(n):
    """Without a backend, which is then not that of the launcher around."""
    import samestep.multiprocessing as mp
    from samestep.launch import network

    with network.reserve_port() as holder:
        mp.spawn(join, (n, holder.getsockname()[1]), n)


def join(rank, n, port):
    import samestep.distributed as dist

    dist.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n)
    x = np.ones(1)
    dist.all_reduce(x)
    print(json.dumps([dist.get_rank(), dist.get_world_size(), float(x[0])]), flush=True)
    dist.destroy_process_group()


def be_refused(backend):
    try:
        ss.initialize(backend, timeout=60)
    except ss.Error as error:
        print(f"refused: {error}", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

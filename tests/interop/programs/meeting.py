"""Two users of the place where ranks meet (MASTER_ADDR, MASTER_PORT) in one program, in the order of the arguments."""

import os
import socket
import sys

import numpy as np
import samestep as ss


def world():
    backend = ss.initialize(timeout=60)
    return lambda: backend.allreduce(np.ones(1))[0] == backend.size


def closed():
    backend = ss.initialize(timeout=60)
    backend.barrier()
    ss.finalize()
    return lambda: True


def face():
    import samestep.distributed as dist

    dist.init_process_group("gloo")
    x = np.ones(1)

    def works():
        dist.all_reduce(x)
        return x[0] == dist.get_world_size()

    return works


def torch_group(name):
    import torch
    import torch.distributed as dist

    dist.init_process_group(name)
    x = torch.ones(1)

    def works():
        dist.all_reduce(x)
        return float(x) == dist.get_world_size()

    return works


def torch_samestep():
    works = torch_group("samestep")
    backend = ss.get_distributed_backend()  # torch's, or the one of `initialize`
    return lambda: works() and ss.initialized() and backend.allreduce(np.ones(1))[0] == backend.size


def torch_gloo():
    return torch_group("gloo")


def torch_elsewhere():
    """A group that has not met at MASTER_PORT."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["OTHER_PLACE"], rank=rank, world_size=size)
    return lambda: True


def jax_processes():
    import jax

    jax.distributed.initialize()
    return lambda: jax.process_count() == len({device.process_index for device in jax.devices()})


def port_is_free():
    """After the others have met: rank 0 could listen there, as torch does."""
    if os.environ["RANK"] == "0":
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        socket.create_server(place, backlog=1).close()
    return lambda: True


def destroy_torch():
    import torch.distributed as dist

    dist.destroy_process_group()
    return lambda: True


if __name__ == "__main__":
    checks = [globals()[name]() for name in sys.argv[1:]]
    for name, works in zip(sys.argv[1:], checks, strict=True):
        assert "destroy_torch" in sys.argv or works(), f"{name}: a wrong result"
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        sys.modules["torch.distributed"].destroy_process_group()
    print("all work", flush=True)

"""Programs that use torch.distributed and nothing of samestep by name, but for the backend."""

import json
import os
import sys

import torch
import torch.distributed as dist


def reduce_alone(backend):
    dist.init_process_group(backend)
    x = torch.ones(2)
    dist.all_reduce(x)
    print(dist.get_world_size(), x.tolist())
    dist.destroy_process_group()


def send_without_waiting():
    assert "samestep._core" not in sys.modules  # the entry point costs nothing
    dist.init_process_group("samestep")
    received = torch.empty(100_000)
    if dist.get_rank() == 0:
        dist.isend(torch.full((100_000,), 7.0), 1)  # neither waited for nor kept
    else:
        dist.recv(received, 0)
        assert (received == 7).all()
        print("arrived", file=sys.stderr)


def reduce_and_print_variables():
    dist.init_process_group("samestep")
    x = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    assert (x == 3).all()
    print(*(os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")))
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

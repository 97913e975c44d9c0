"""Programs of test_dist_groups.py: groups on another backend than the world."""

import json
import os
import sys

import numpy as np
import samestep.distributed as dist


def use_groups_of_another_backend(world, other, destroys):
    if "SPREAD" in os.environ:
        os.environ["SAMESTEP_HOST_ID"] = "AAB"[int(os.environ["RANK"])]
    dist.init_process_group(world)
    part = dist.new_group(backend=other)
    x = np.arange(1009.0) + dist.get_rank()
    dist.all_reduce(x, group=part)
    assert (x == 3 * np.arange(1009.0) + 3).all()
    second = dist.new_group([2, 0], backend=other)
    if dist.get_rank() != 1:
        y = np.full(2, dist.get_rank() + 1.0)
        dist.broadcast(y, 2, group=second)
        assert (y == 3).all()
    print(dist.get_backend(), dist.get_backend(part), part.transport)
    if destroys:
        dist.destroy_process_group()


def ask_for_a_group_over_mpi():
    dist.init_process_group("gloo")
    dist.new_group(backend="mpi")


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

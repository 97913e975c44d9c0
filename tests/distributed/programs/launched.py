"""Programs of test_dist_launch.py: ranks of samestep.distributed.launch with `--use_env`."""

import json
import os
import sys

import numpy as np
import samestep.distributed as dist


def reduce():
    dist.init_process_group("gloo")
    x = np.full(3, float(dist.get_rank()))
    dist.all_reduce(x)
    print(dist.get_rank(), dist.get_world_size(), x[0])


def write_to_both_outputs():
    print("out", os.environ["RANK"])
    print("err", os.environ["RANK"], file=sys.stderr)


def exit_while_others_reduce():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        sys.exit(7)
    dist.all_reduce(np.ones(3))


def exit_with_3():
    sys.exit(3)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

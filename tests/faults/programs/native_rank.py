"""What programs of ranks without a launcher share; see native_ranks.py."""

import json
import os

import samestep as ss

rank, size, folder = int(os.environ["TEST_RANK"]), int(os.environ["TEST_SIZE"]), os.environ["TEST_FOLDER"]


def start(n=size, timeout=30.0, store="store", me=rank):
    return ss.initialize(
        "native", init_method=f"file://{folder}/{store}", rank=me, world_size=n, timeout=timeout
    )


def report(**found):
    os.write(1, (json.dumps(found) + "\n").encode())  # at once: several processes write to one pipe

"""Prints its arguments and what a launcher says in variables, as JSON."""

import json
import os
import sys

NAMES = (
    "MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK OMP_NUM_THREADS"
    " SAMESTEP_SECRET"
)

print(json.dumps({"argv": sys.argv[1:], **{name: os.environ.get(name) for name in NAMES.split()}}))

"""Programs of test_unequal_settings.py and test_wrong_launch.py: starts that fail, and succeed afterwards."""

import json
import os
import sys

import numpy as np
import samestep as ss


def change_settings_of_rank_1(backend, values):
    """Prints the errors of one start for each name and value, and the result of an allreduce after another."""
    rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    found = []
    for name, value in values:
        if rank == 1:
            os.environ[name] = value
        try:
            ss.initialize(backend, timeout=60)
        except ss.Error as error:
            found.append([type(error).__name__, str(error)])
        os.environ.pop(name, None)
    with ss.initialize(backend, timeout=60) as world:
        found.append(world.allreduce(np.full(200_000, rank + 1.0))[7])
    print(json.dumps(found))


def be_refused(backend):
    try:
        ss.initialize(backend)
    except ss.UnavailableError as error:
        print("refused:", error)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

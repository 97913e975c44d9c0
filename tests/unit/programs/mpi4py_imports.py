"""A program that asks for the MPI library before it imports mpi4py."""

import json
import sys


def probe():
    from samestep.world import choice

    known = choice.gather(probe_mpi=True)
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    print(known.mpi_loadable, MPI.Is_initialized())


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

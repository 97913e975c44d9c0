"""The benchmark of collectives with a contender whose result is one element too large on the last rank."""

import dataclasses
import sys

import collectives
import contenders

STATEMENT = "comm.Allreduce(MPI.IN_PLACE, x); x[-1] += comm.rank == comm.size - 1"


def wrong():
    return dataclasses.replace(contenders._mpi4py(), name="wrong", statements={"allreduce": STATEMENT})


contenders.CONTENDERS["wrong"] = wrong
sys.exit(collectives.main())

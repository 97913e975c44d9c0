"""Programs that import mpi4py: where no MPI library can be loaded, and where one can."""

import builtins
import json
import sys


def import_without_a_library(error_name):
    from _samestep_torch import no_mpi

    no_mpi.install()
    no_mpi.install()
    try:
        from mpi4py import MPI  # noqa: F401
    except getattr(builtins, error_name) as error:
        print(error)
    import mpi4py.util  # noqa: F401  # other modules of it are found as ever


def import_with_a_library():
    from _samestep_torch import no_mpi

    no_mpi.install()
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    print(MPI.Is_initialized())


def probe():
    from samestep.world import environment

    known = environment.gather(probe_mpi=True)
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    print(known.mpi_loadable, MPI.Is_initialized())


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))

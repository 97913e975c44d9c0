"""`samestep bench`: how long an allreduce takes on this machine, with mpi4py's beside it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from samestep import facts


def main(argv: Sequence[str]) -> int:
    """Runs `samestep bench`; returns the exit code.

    Outside of a launcher it starts the ranks itself, by `samestep run`; as a rank it measures.
    """
    parser = argparse.ArgumentParser(
        prog="samestep bench",
        description="Times allreduce of NumPy arrays, in place, many calls in a row; a minute at most. Also "
        "under another launcher: mpirun -n 2 samestep bench.",
    )
    parser.add_argument("-n", type=int, default=2, metavar="N", help="ranks to start (%(default)s)")
    flags = parser.parse_args(argv)
    if facts.launcher().name:
        from samestep.bench import allreduce

        return allreduce.main()
    from samestep.launch import mpirun, run

    try:
        mpirun.find()
        way = "--mpi"  # mpi4py's times beside ours
    except mpirun.LaunchError:
        way = "--native"
    return run.main([way, "-n", str(flags.n), "--raw", "-m", "samestep", "bench"])

"""`samestep bench`: times a collective on this machine, beside mpi4py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from samestep._util import launchers
from samestep.launch.arguments import whole_number

VERBS = ("allreduce", "bcast", "allgather", "reduce_scatter", "alltoall")
_DESCRIPTION = """\
Times a collective on float32 arrays, many calls in a row, in about a minute: on ordinary NumPy arrays
(samestep), on arrays of backend.empty (shared), and with mpi4py on ordinary ones where an MPI library is
there. Also under another launcher: mpirun -n 2 samestep bench. Close other programs first: a busy core
doubles the times of waiting ranks."""


def main(argv: Sequence[str]) -> int:
    """Runs `samestep bench`; returns the exit code.

    Outside of a launcher it starts the ranks itself, by `samestep run`; as a rank it measures.
    """
    flags = _arguments(argv)
    if launchers.launcher().name:
        from samestep.bench import ranks

        return ranks.main(flags.verb, flags.plot)
    from samestep.launch import mpirun, run

    try:
        mpirun.find()
        launcher = "--mpi"  # mpi4py's times beside ours
    except mpirun.LaunchError:
        launcher = "--native"
    return run.main([launcher, "-n", str(flags.n), "--raw", "-m", "samestep", "bench", *argv])


def parser() -> argparse.ArgumentParser:
    """Of `samestep bench`."""
    parser = argparse.ArgumentParser(prog="samestep bench", description=_DESCRIPTION)
    parser.add_argument("-n", type=whole_number, default=2, metavar="N", help="ranks to start (%(default)s)")
    parser.add_argument("--verb", choices=VERBS, default=VERBS[0], help="what to time (%(default)s)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the times over size; needs matplotlib"
    )
    return parser


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    ours = parser()
    flags = ours.parse_args(argv)
    if flags.plot and not find_spec("matplotlib"):
        ours.error("--plot needs matplotlib: pip install matplotlib")
    if flags.plot and not flags.plot.parent.is_dir():
        ours.error(f"there is no folder {flags.plot.parent}")
    return flags

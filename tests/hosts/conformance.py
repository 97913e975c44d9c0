#!/usr/bin/env python3
"""The suite that defines a backend, over hosts that nothing but a network connects. Needs root, Open MPI and iproute2.

    python tests/hosts/conformance.py                                   # all of it: some two minutes on two quiet cores
    python tests/hosts/conformance.py --layouts 1,2,1 --backends native tests/conformance/test_work.py

The ranks are started by `mpirun`, as `mpirun -n N pytest` is; the native backend is tested without MPI all the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import lab as labs

SUITE = Path(__file__).parents[1] / "conformance"
LAYOUTS = ("1,1", "2,2", "1,2,1")  # ranks of each host
BACKENDS = ("mpi", "native")
MOST_S = 1500.0
_SETTINGS = ["-o", "samestep_ranks_expected=", "-p", "no:cacheprovider"]
_ABOUT_ONE_HOST = ["-k", "not on_one_host and not shared_arrays"]


def run(lab, layout, backends, files=(), most_s=MOST_S):
    """Runs the suite, or some of its files, with as many ranks on each host as `layout` says.

    Args:
      lab: with as many hosts.
      layout: such as "1,2,1".
      backends: names of the backends that the fixture `group` stands for.
      most_s: seconds; then the run has failed.

    Returns:
      The exit code, and what was printed.
    """
    hosts = ",".join(f"node{i}:{n}" for i, n in enumerate(layout.split(",")))
    settings = ["-o", f"samestep_backends={' '.join(backends)}", *_SETTINGS, *_ABOUT_ONE_HOST]
    pytest = ["-m", "pytest", "-q", *settings, *(map(str, files) if files else [str(SUITE)])]
    process = lab.start(
        "node0",
        [*_RUN, f"--hosts={hosts}", f"--env=SAMESTEP_TEST_LAYOUT={layout}", *pytest],
        cwd=SUITE,
    )
    try:
        text, _ = process.communicate(timeout=most_s)
    except BaseException:
        process.terminate()  # which ends the ranks
        process.communicate(timeout=labs.PATIENCE_S)
        raise
    return process.returncode, text


# The hosts share the machine's cores, which Open MPI cannot know: its ranks have to yield to each other.
_RUN = [sys.executable, "-m", "samestep", "run", "--mpi", "--raw", "--env=OMPI_MCA_mpi_yield_when_idle=1"]


def main() -> int:
    """Runs all layouts and backends; prints the end of what each run says, and all of one that fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    split = {"type": lambda text: text.split()}
    parser.add_argument("--layouts", default=LAYOUTS, help="ranks of each host, as in '1,1 2,2'", **split)
    parser.add_argument("--backends", default=BACKENDS, **split)
    parser.add_argument("files", nargs="*", type=lambda text: Path(text).resolve())
    args = parser.parse_args()
    if reason := labs.missing():
        sys.exit(f"conformance.py: {reason}")
    failed = False
    for layout in args.layouts:
        for backend in args.backends:
            lab = labs.Lab(len(layout.split(",")))
            begin = time.monotonic()
            try:
                code, text = run(lab, layout, [backend], args.files)
            finally:
                lab.close()
            failed |= code != 0
            reported = (
                text if code else next(line for line in reversed(text.splitlines()) if " passed" in line)
            )
            print(f"{layout} ranks, {backend}, {time.monotonic() - begin:.0f} s: {reported}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

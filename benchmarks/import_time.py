"""How long `from samestep import *` takes beyond `import numpy`, in fresh interpreters.

`import samestep` alone loads nothing: names are imported at first use.

python benchmarks/import_time.py [--pairs N] [--require]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

import machine

LIMIT_MS = 60.0

# Variables by which a launcher tells a process that it is a rank.
_RANK_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "HYDI_", "SLURM_")


@dataclass(frozen=True)
class ImportTime:
    """Milliseconds, medians over pairs of interpreters.

    Attributes:
      numpy, samestep: `import numpy`; `from samestep import *`, which imports NumPy.
      added: the median of the differences within pairs.
      pairs: how many.
      others: cores that other processes used meanwhile.
    """

    numpy: float
    samestep: float
    added: float
    pairs: int
    others: float

    def __str__(self) -> str:
        return (
            f"import numpy {self.numpy:.1f} ms, from samestep import * {self.samestep:.1f} ms, "
            f"added {self.added:.1f} ms (medians of {self.pairs} pairs of new interpreters; others used "
            f"{self.others:.2f} cores)"
        )


def measure(pairs: int = 15) -> ImportTime:
    """Starts `2 * pairs` interpreters in turn, after two that warm the file cache."""
    once("from samestep import *")
    once("import numpy")
    cpus = os.sched_getaffinity(0)
    start = machine.clock(cpus)
    times = [(once("import numpy"), once("from samestep import *")) for _ in range(pairs)]
    wall, idle, stolen, own = (now - then for now, then in zip(machine.clock(cpus), start, strict=True))
    return ImportTime(
        statistics.median(numpy for numpy, _ in times),
        statistics.median(ours for _, ours in times),
        statistics.median(ours - numpy for numpy, ours in times),
        pairs,
        max(0.0, wall * len(cpus) - idle - own, stolen) / wall,
    )


def once(statement: str) -> float:
    """Milliseconds that the statement takes in a new interpreter, whose own start does not count."""
    code = f"from time import perf_counter as t; s = t(); {statement}; print((t() - s) * 1000)"
    env = {name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{statement} failed in a new interpreter:\n{done.stderr}")
    return float(done.stdout)


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--require", action="store_true", help=f"exit with 1 above {LIMIT_MS:g} ms")
    flags = parser.parse_args()
    found = measure(flags.pairs)
    print(found)
    return int(flags.require and found.added > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())

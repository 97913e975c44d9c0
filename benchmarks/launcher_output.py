"""What a rank's output costs through `samestep run`, beside torchrun: many short lines, by a pipe and a terminal.

Wall-clock time, and processor time of the ranks, the launcher and the reader together, run from the moment at which
all ranks may begin to the last line that arrives: the start does not count. The launchers take turns, and the figures
are medians of the ratios of neighbouring runs: a machine that is busy is so for both. There, wall-clock time also
tells into how many processes the work is split, as each gets its share; processor time is what the output costs.

    python benchmarks/launcher_output.py            # 100,000 lines of one rank, 7 rounds
    python benchmarks/launcher_output.py -n 2       # of each of two ranks
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from samestep.launch import processes

_RANK = Path(__file__).with_name("launcher_output_rank.py")
_LAUNCHERS = {
    "samestep run": ["samestep", "run", "-n"],
    "torchrun": ["torch.distributed.run", "--nproc-per-node"],
}


class Cost(NamedTuple):
    """Seconds of one run: by the clock, and of all processors together."""

    wall: float
    processors: float


class Reader:
    """Counts the lines of all ranks that arrive at a pipe or a terminal and end in a given word."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def wait(self, word: bytes, n: int) -> None:
        """Reads until `n` lines have ended in `word`."""
        while n > 0:
            data = os.read(self._descriptor, 1 << 16)
            if not data:
                raise SystemExit("the launcher has ended before its ranks")
            *whole, self._rest = (self._rest + data).split(b"\n")
            n -= sum(line.rstrip().endswith(word) for line in whole)


def processor_time(pid: int) -> float:
    """Seconds that this process, `pid` and all below it have run so far."""
    total = time.process_time()
    for each in [pid, *processes.descendants(pid)]:
        for file in Path(f"/proc/{each}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # a thread has ended
                total += int(file.read_text().split()[0]) / 1e9
    return total


def cost(launcher: str, n: int, lines: int, *, terminal: bool) -> Cost:
    """From the ranks' first line to the last one that arrives."""
    reading, writing = os.openpty() if terminal else os.pipe()
    module, *flags = _LAUNCHERS[launcher]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, *flags, str(n), str(_RANK), folder, str(lines)]
        env = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=writing, stderr=subprocess.DEVNULL, env=env
        )
        os.close(writing)
        reader = Reader(reading)
        reader.wait(b"begin", n)
        begin, before = time.perf_counter(), processor_time(process.pid)
        (Path(folder) / "begin").touch()
        reader.wait(b"end", n)
        found = Cost(time.perf_counter() - begin, processor_time(process.pid) - before)
        (Path(folder) / "end").touch()
        with contextlib.suppress(OSError):  # the end of a terminal
            while os.read(reading, 1 << 16):
                continue
        os.close(reading)
        if process.wait():
            raise SystemExit(f"{launcher} ended with code {process.returncode}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=1, help="ranks (%(default)s)")
    parser.add_argument("--lines", type=int, default=100_000, help="of each rank (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of all (%(default)s)")
    flags = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        parser.error("torchrun is part of torch: pip install torch")
    for terminal in (False, True):
        costs: dict[str, list[Cost]] = {name: [] for name in _LAUNCHERS}
        for _ in range(flags.rounds):
            for name, taken in costs.items():
                taken.append(cost(name, flags.n, flags.lines, terminal=terminal))
        for field in Cost._fields:
            times = {name: [getattr(each, field) for each in taken] for name, taken in costs.items()}
            ratios = [ours / theirs for ours, theirs in zip(*times.values(), strict=True)]
            medians = ", ".join(f"{name} {statistics.median(taken):.2f} s" for name, taken in times.items())
            print(
                f"{'terminal' if terminal else 'pipe'}, {field}: {medians}; "
                f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()

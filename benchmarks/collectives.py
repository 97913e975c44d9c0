"""Collectives from Python: samestep beside mpi4py, gloo and what the memory allows, in one set of processes.

    python benchmarks/collectives.py -n 2                                    # --quick: 2-3 minutes
    python benchmarks/collectives.py -n 4 --full --json out.json --plot out.svg
    mpiexec -n 4 python benchmarks/collectives.py --verbs allreduce --sizes 8,1MiB

All ranks on one host; outside of a launcher it starts them by `samestep run --mpi`. The method is in
README.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import goals
import harness
import import_time
import machine
import render
import results
import schedule
from contenders import CONTENDERS, NEEDS, Contender
from harness import Settings
from mpi4py import MPI
from problems import DTYPES, VERBS
from processes import Ranks
from progress import DEFAULT_TERMINAL, Progress
from results import Point, Result, sizes_of
from samestep._util import launchers
from samestep.launch import run

IMPORT = "import"


def main() -> int:
    """Starts the ranks, or is one of them; returns the exit code."""
    if launchers.launcher().name:
        try:
            return _as_rank()
        except Exception:  # at its end a rank would wait for the others, and they wait for it
            traceback.print_exc()
            sys.stderr.flush()
            MPI.COMM_WORLD.Abort(1)
    flags = _arguments()
    words = ["-n", str(flags.n), "--mpi", "--raw", __file__, *sys.argv[1:]]
    if sys.stderr.isatty():
        words += ["--terminal", os.ttyname(sys.stderr.fileno())]
    return run.main(words)


def _as_rank() -> int:
    """Measures, prints the table, writes what was asked for; returns the exit code."""
    ranks = Ranks()
    with _silent(ranks.rank != 0):
        flags = _arguments()
    contenders, absent = _contenders(ranks, flags.contenders)
    found_here = ranks.alone(machine.facts)
    _say(ranks, machine.describe(found_here, ranks.size))
    for name, why in absent.items():
        _say(ranks, f"left out: {name}: {why}")
    points, refused = _points(ranks, contenders, flags)
    imported = _import(ranks, flags) if IMPORT in flags.verbs else None
    for contender in contenders:
        contender.close()
    result = Result(
        machine=found_here,
        ranks=ranks.size,
        command=_command(sys.argv, ranks.size),
        settings={"rounds": flags.preset.rounds, "seconds": flags.preset.seconds, "burst": flags.burst},
        contenders=[contender.name for contender in contenders],
        points=points,
        absent=absent | refused,
        import_ms=asdict(imported) if imported else None,
    )
    return _finish(result, flags) if ranks.rank == 0 else 0


def _command(argv: Sequence[str], ranks: int) -> str:
    """What makes such a result anywhere: without the files written here. Pure.

    Example:
      >>> _command(["/tree/benchmarks/collectives.py", "-n", "2", "--full", "--json", "x.json"], 2)
      'python benchmarks/collectives.py -n 2 --full'
    """
    words, kept = iter(argv[1:]), []
    for word in words:
        if word in ("-n", "--json", "--plot", "--terminal"):
            next(words, None)
        else:
            kept.append(word)
    return shlex.join(["python", "benchmarks/collectives.py", "-n", str(ranks), *kept])


def _finish(result: Result, flags: argparse.Namespace) -> int:
    print(render.summary(result.points))
    if flags.json:
        results.save(result, flags.json)
    if flags.plot:
        import plots

        plots.relative_times(result, None, flags.plot)
    if not flags.require:
        return 0
    print("\n".join(goals.table(result)))
    return int(bool(goals.missed(result)))


def _contenders(ranks: Ranks, names: Sequence[str]) -> tuple[list[Contender], dict[str, str]]:
    """Those that can be made on every rank, and why others cannot."""
    made, absent = [], {}
    for name in names:
        why = ""
        try:
            contender = CONTENDERS[name]()
        except ImportError as error:
            if name not in NEEDS:
                raise
            why = f"{NEEDS[name]} is not installed ({error})"
        if why := ranks.first_of(why):
            absent[name] = why
        else:
            made.append(contender)
    if not made:
        raise SystemExit(f"nobody to measure: {absent}")
    return made, absent


def _points(
    ranks: Ranks, contenders: Sequence[Contender], flags: argparse.Namespace
) -> tuple[list[Point], dict[str, str]]:
    """Measures all cells; what was found, and what contenders refused to do."""
    verbs = [verb for verb in flags.verbs if verb != IMPORT]
    cells = schedule.cells(flags.preset, verbs=verbs, dtypes=flags.dtypes, sizes=flags.sizes)
    cells = [cell for cell in cells if any(contender.has(cell) for contender in contenders)]
    names = [contender.name for contender in contenders]
    settings = Settings(flags.preset.rounds, flags.burst)
    progress = Progress(flags.terminal or DEFAULT_TERMINAL, shown=ranks.rank == 0)
    points: list[Point] = []
    refused: dict[str, str] = {}
    if cells:
        _say(ranks, render.header(names))
    begin, least = time.monotonic(), flags.preset.seconds / max(len(cells), 1) / 3  # the last are not starved
    for done, cell in enumerate(cells):
        spent = time.monotonic() - begin
        left = flags.preset.seconds - spent
        progress.update(done, len(cells), max(left, spent / (done + 1) * (len(cells) - done) / 4), str(cell))
        seconds = ranks.agree(max(schedule.share(left, cells[done:], ranks.size), least))
        found = harness.measure(ranks, contenders, cell, settings, seconds)
        points.append(found.point)
        progress.clear()
        _say(ranks, render.row(found.point, names))
        for name, why in found.refused.items():
            what = f"{name}, {cell.verb} {cell.dtype}"
            if what not in refused:
                _say(ranks, f"left out: {what}: {why}")
            refused[what] = why
    return points, refused


def _import(ranks: Ranks, flags: argparse.Namespace) -> import_time.ImportTime:
    found = ranks.alone(lambda: import_time.measure(flags.preset.import_pairs))
    _say(ranks, str(found))
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-n", type=_positive, default=2, metavar="N", help="ranks to start (%(default)s)")
    add(
        "--terminal", help=argparse.SUPPRESS
    )  # for the progress bar; set by the process that starts the ranks
    preset = parser.add_mutually_exclusive_group()
    preset.add_argument("--quick", action="store_true", help="2-3 minutes (the default)")
    preset.add_argument(
        "--full", action="store_true", help="all sizes and types, as in the tables of the pages"
    )
    add("--verbs", type=_words((*VERBS, IMPORT)), default=[*VERBS, IMPORT], metavar="A,B", help=_list(VERBS))
    add(
        "--sizes", type=sizes_of, default=(), metavar="8,64KiB", help="bytes of the array each rank passes in"
    )
    add("--dtypes", type=_words(DTYPES), default=(), metavar="A,B", help=f"of allreduce: {_list(DTYPES)}")
    add(
        "--contenders",
        type=_words(CONTENDERS),
        default=[*CONTENDERS],
        metavar="A,B",
        help=f"{_list(CONTENDERS)}; ratios are to the first",
    )
    add("--rounds", type=_positive, help="turns for each contender in each cell (quick 3, full 6)")
    add("--seconds", type=_positive, help="for all cells together, about (quick 120, full 215)")
    add("--burst", type=_positive, default=1000, help="most calls in a row back to back (%(default)s)")
    add("--json", type=_writable, metavar="FILE", help="write all figures and the facts of the machine")
    add("--plot", type=_writable, metavar="FILE", help="write a figure of relative times; needs matplotlib")
    add("--require", action="store_true", help="print the goals (goals.py); exit with 1 if one is missed")
    flags = parser.parse_args()
    chosen = schedule.FULL if flags.full else schedule.QUICK
    flags.preset = replace(
        chosen, rounds=flags.rounds or chosen.rounds, seconds=flags.seconds or chosen.seconds
    )
    _check_packages(parser, flags)
    return flags


def _check_packages(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Before minutes of measuring, not after them."""
    if flags.plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--plot needs matplotlib: pip install matplotlib")
    if "bfloat16" in (flags.dtypes or flags.preset.dtypes):
        try:
            import ml_dtypes  # noqa: F401
        except ImportError:
            if flags.dtypes:
                parser.error("bfloat16 arrays of NumPy need ml_dtypes: pip install ml_dtypes")
            print("left out: bfloat16: ml_dtypes is not installed", flush=True)
            flags.dtypes = [dtype for dtype in flags.preset.dtypes if dtype != "bfloat16"]


def _words(known: Sequence[str] | dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        words = [word for word in text.split(",") if word]
        unknown = [word for word in words if word not in known]
        if unknown or not words:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown) or 'nothing'}; known are {', '.join(known)}"
            )
        return words

    return parse


def _list(known: Sequence[str] | dict[str, Any]) -> str:
    return f"some of {', '.join(known)}"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _writable(text: str) -> Path:
    """A path; its folder is looked for now, not after minutes of measuring."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


@contextlib.contextmanager
def _silent(yes: bool) -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
        if yes:
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def _say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Collectives from Python: mpi4py and samestep side by side, in one set of processes.

    samestep run -n 2 --mpi benchmarks/collectives.py --quick
    samestep run -n 2 --mpi benchmarks/collectives.py --json out.json --plot out.png
    samestep run -n 2 --mpi benchmarks/collectives.py --quick --require

All ranks on one host. The method is in README.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import goals
import import_time
import machine
import render
from contenders import CONTENDERS, Contender
from harness import Point, Ranks, Settings, measure
from problems import DTYPE, VERBS, WITHOUT_SIZES

KIB, MIB = 1 << 10, 1 << 20
SIZES = (8, 64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
QUICK_SIZES = (8, KIB, 64 * KIB, MIB)
BACK_TO_BACK = 4 * KIB  # up to here also in bursts; one call is then shorter than the way out of a barrier
IMPORT = "import"


def plan(
    verbs: Sequence[str], sizes: Sequence[int], *, quick: bool, require: bool
) -> list[tuple[str, int, str]]:
    """What to measure, as (verb, nbytes, mode) without repetition, in the order of `verbs`. Pure.

    Example:
      >>> plan(["barrier"], [8], quick=True, require=False)
      [('barrier', 0, 'b2b')]
    """
    points: dict[tuple[str, int, str], None] = {}
    for verb in verbs:
        for nbytes in (WITHOUT_SIZES[verb],) if verb in WITHOUT_SIZES else sizes:
            small = nbytes <= BACK_TO_BACK
            if not (small and quick):
                points[verb, nbytes, "single"] = None
            if small:
                points[verb, nbytes, "b2b"] = None
        if require:
            points.update(dict.fromkeys((g.verb, g.nbytes, g.mode) for g in goals.GOALS if g.verb == verb))
    if require:
        points.update(dict.fromkeys((g.verb, g.nbytes, g.mode) for g in goals.GOALS))
    return list(points)


def main() -> int:
    """Measures, prints the table, writes what was asked for; returns the exit code."""
    ranks = Ranks()
    with _silent(ranks.rank != 0):
        flags = _arguments(ranks.size)
    facts = ranks.alone(machine.facts)
    contenders = [CONTENDERS[name]() for name in flags.contenders]
    _say(ranks, machine.line(facts, ranks.size))
    points = _points(ranks, contenders, flags)
    imported = _import(ranks, flags) if IMPORT in flags.verbs or flags.require else None
    for contender in contenders:
        contender.close()
    verdicts = goals.judge(points, imported) if flags.require and imported else []
    for verdict in verdicts:
        _say(ranks, str(verdict))
    if ranks.rank != 0:
        return 0
    if flags.json:
        report = {
            "schema": 1,
            "machine": facts,
            "ranks": ranks.size,
            "dtype": DTYPE.name,
            "settings": asdict(_settings(flags)),
            "contenders": flags.contenders,
            "points": [asdict(point) for point in points],
            "import_ms": asdict(imported) if imported else None,
            "goals": [{**asdict(verdict), "reached": verdict.reached} for verdict in verdicts],
        }
        flags.json.write_text(json.dumps(report, indent=1) + "\n")
    if flags.plot:
        render.plot(points, flags.contenders, machine.line(facts, ranks.size), flags.plot)
    missed = [verdict.name for verdict in verdicts if not verdict.reached]
    if missed:
        print(f"goals missed: {', '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


def _settings(flags: argparse.Namespace) -> Settings:
    return Settings(flags.rounds, flags.block, flags.burst)


def _points(ranks: Ranks, contenders: Sequence[Contender], flags: argparse.Namespace) -> list[Point]:
    verbs = [verb for verb in flags.verbs if verb != IMPORT]
    _say(ranks, render.header(flags.contenders))
    points = []
    for verb, nbytes, mode in plan(verbs, flags.sizes, quick=flags.quick, require=flags.require):
        once = partial(
            measure, ranks, contenders, verb=verb, nbytes=nbytes, mode=mode, settings=_settings(flags)
        )
        is_goal = any((goal.verb, goal.nbytes, goal.mode) == (verb, nbytes, mode) for goal in goals.GOALS)
        points.append(goals.undisturbed(once) if flags.require and is_goal else once())
        _say(ranks, render.row(points[-1], flags.contenders))
    return points


def _import(ranks: Ranks, flags: argparse.Namespace) -> import_time.ImportTime:
    once = partial(import_time.measure, 7 if flags.quick else 15)
    found = ranks.alone(partial(goals.undisturbed, once) if flags.require else once)
    _say(ranks, str(found))
    return found


def _arguments(size: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer sizes, shorter blocks: under a minute")
    add("--verbs", type=_words((*VERBS, IMPORT)), default=[*VERBS, IMPORT], metavar="A,B", help=_list(VERBS))
    add("--sizes", type=_sizes, metavar="8,64KiB", help="bytes of the array each rank passes in")
    add(
        "--contenders",
        type=_words(CONTENDERS),
        default=["mpi4py", "samestep", "shared"],
        metavar="A,B",
        help=_list(CONTENDERS),
    )
    add("--rounds", type=_positive, help="turns of each contender at each point (quick 2, else 4)")
    add("--block", type=float, help="seconds of a turn (quick 0.1, else 0.2)")
    add("--burst", type=_positive, default=1000, help="most calls in a row back to back (%(default)s)")
    add("--json", type=_writable, metavar="FILE", help="write all figures and the facts of the machine")
    add("--plot", type=_writable, metavar="FILE", help="write a figure of times and ratios; needs matplotlib")
    add("--require", action="store_true", help="measure and check the goals; exit with 1 if one is missed")
    flags = parser.parse_args()
    flags.sizes = flags.sizes or (QUICK_SIZES if flags.quick else SIZES)
    flags.rounds = flags.rounds or (2 if flags.quick else 4)
    flags.block = flags.block or (0.1 if flags.quick else 0.2)
    if flags.require and (size != goals.RANKS or flags.contenders[:2] != ["mpi4py", "samestep"]):
        parser.error(
            f"--require: the goals are for mpi4py and samestep on {goals.RANKS} ranks, not for "
            f"{', '.join(flags.contenders)} on {size}"
        )
    if flags.plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--plot needs matplotlib: pip install matplotlib")
    return flags


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


def _sizes(text: str) -> list[int]:
    """Sizes in bytes.

    Example:
      >>> _sizes("8,4KiB,1MiB")
      [8, 4096, 1048576]
    """
    sizes = []
    for word in text.split(","):
        number, factor = word.strip(), 1
        for suffix, scale in (("KiB", KIB), ("MiB", MIB), ("B", 1)):
            if number.endswith(suffix):
                number, factor = number[: -len(suffix)], scale
                break
        if not number.isdecimal() or int(number) * factor < DTYPE.itemsize:
            raise argparse.ArgumentTypeError(
                f"{word!r}: sizes are like 8, 64KiB, 1MiB, at least {DTYPE.itemsize}"
            )
        sizes.append(int(number) * factor)
    return sizes


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
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

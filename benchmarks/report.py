"""Renders results as the tables and figures of docs/performance.md.

    python benchmarks/report.py benchmarks/results/*.json
    python benchmarks/report.py --stdout benchmarks/results/*.json

What stands between the two comments in the page is replaced, and the figures beside it are written anew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import machine
import results
from results import AS_FLOAT32, LIMIT, Point, Result, microseconds, size, times_faster

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
FIGURES = "assets/performance"

NAMES = {"mpi4py": "mpi4py", "gloo": "gloo", "samestep": "non-shared arrays", "shared": "`backend.empty`"}
SLOWER = "Where it loses"


def page(old: str, new: str) -> str:
    """The page with what stands between the comments replaced. Pure.

    Raises:
      ValueError: the comments are not there once each, in order.

    Example:
      >>> page(f"a {BEGIN} old {END} b", "new")
      'a <!-- results: begin -->\\n\\nnew\\n\\n<!-- results: end --> b'
    """
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise ValueError(f"the page needs the comments {BEGIN} and {END}, once each")
    return f"{old[: old.index(BEGIN)]}{BEGIN}\n\n{new}\n\n{old[old.index(END) :]}"


def by_ranks(found: Sequence[Result]) -> dict[int, list[Result]]:
    """Runs by number of ranks; the first of each, Open MPI's where there is one, is what others stand beside. Pure.

    Raises:
      ValueError: two runs have the same ranks and the same MPI library.
    """
    groups: dict[int, list[Result]] = {}
    for result in sorted(found, key=lambda r: (r.ranks, r.machine["mpi"]["name"] != "Open MPI", r.mpi)):
        group = groups.setdefault(result.ranks, [])
        if any(result.mpi == other.mpi for other in group):
            raise ValueError(f"two results with {result.mpi} on {result.ranks} ranks")
        group.append(result)
    return groups


def render(found: Sequence[Result], figures: str = FIGURES) -> str:
    """All tables as Markdown. Pure."""
    if not found:
        return "No results yet: `benchmarks/run_all.sh` makes them."
    groups = by_ranks(found)
    found = [run for runs in groups.values() for run in runs]
    parts = [_losing(found)]
    for ranks, runs in groups.items():
        parts += [f"## Appendix: {ranks} ranks", _facts(runs), _figure(ranks, runs, figures)]
        parts += [_table(verb, dtype, runs) for verb, dtype in _sections(runs[0])]
    parts += [_imports(found), _left_out(found)]
    return "\n\n".join(part for part in parts if part)


def _facts(runs: Sequence[Result]) -> str:
    rows = []
    for run in runs:
        out, made = results.left_out(run.points)
        noisy = sum(point.disturbed for point in run.points)
        where = machine.describe(run.machine, run.ranks)
        text = f"- {where}; {run.machine['system']}; {run.machine['memory_gib']} GiB. "
        text += (
            f"{run.machine['utc']} UTC, commit {run.machine['commit']}. {out} of {made} rounds left out as "
        )
        text += "other processes disturbed them"
        text += f", **{noisy} cells disturbed all the time**." if noisy else "."
        tuned = "".join(f" {name}={value}" for name, value in run.machine["settings"].items())
        rows.append(f"{text}\n  `{tuned.strip()}{' ' if tuned else ''}{run.command}`")
    return "\n".join(rows)


def _figure(ranks: int, runs: Sequence[Result], figures: str) -> str:
    alt = f"Time relative to mpi4py on {runs[0].mpi} over size, for each verb, {ranks} ranks"
    return f"![{alt}]({figures}/{ranks}-ranks.svg)"


def _sections(run: Result) -> list[tuple[str, str]]:
    return list(dict.fromkeys((point.cell.verb, point.cell.dtype) for point in run.points))


def _table(verb: str, dtype: str, runs: Sequence[Result]) -> str:
    """One verb: microseconds of the first run, and how many times faster ours is than each rival, in its run."""
    main = runs[0]
    points = [p for p in main.points if (p.cell.verb, p.cell.dtype) == (verb, dtype)]
    named = [name for name in ("mpi4py", "gloo", "samestep", "shared", LIMIT) if _any_has(points, name)]
    half = _any_has(points, AS_FLOAT32)
    heads = ["size", "calls", *(_column(name, main, verb) for name in named)]
    heads += [
        f"{NAMES[ours]}: times faster than {_rivals(runs, named)}" for ours in results.OURS if ours in named
    ]
    heads += ["`backend.empty`: time over that of as many float32"] if half else []
    title = f"### {verb}" + ("" if dtype == "float32" else f", {dtype}") + f", {runs[0].ranks} ranks"
    lines = [_row(heads), _row(["---", "---", *["---:"] * (len(heads) - 2)])]
    for point in sorted(points, key=lambda p: (p.cell.mode != "b2b", p.cell.nbytes)):
        cells = [_size(point), "back to back" if point.cell.mode == "b2b" else "single"]
        cells += [_time(point, name) for name in named]
        cells += [_ratios(point, ours, runs) for ours in results.OURS if ours in named]
        cells += [_half(point)] if half else []
        lines.append(_row(cells))
    return f"{title}\n\n" + "\n".join(lines)


def _any_has(points: Sequence[Point], name: str) -> bool:
    return any(name in point.summaries for point in points)


def _column(name: str, run: Result, verb: str) -> str:
    limit = "read+write once" if verb == "allreduce" else "copy once"
    return {"mpi4py": run.mpi, LIMIT: limit}.get(name) or NAMES[name]


def _rivals(runs: Sequence[Result], named: Sequence[str]) -> str:
    rivals = [run.machine["mpi"]["name"] for run in runs if "mpi4py" in named]
    return " · ".join(rivals + (["gloo"] if "gloo" in named else []))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _size(point: Point) -> str:
    shown = size(point.cell.nbytes) if point.cell.nbytes else "-"
    return shown + (" †" if point.disturbed else "")


def _time(point: Point, name: str) -> str:
    found = point.summaries.get(name)
    return f"{microseconds(found.median_us)} ({microseconds(found.p99_us)})" if found else "-"


def _ratios(point: Point, ours: str, runs: Sequence[Result]) -> str:
    """Times faster than mpi4py of each run and than gloo, each within its own run; losing ones bold."""
    found = [times_faster(there, ours, "mpi4py") if (there := run.find(point.cell)) else None for run in runs]
    ratios = found if any(ratio is not None for ratio in found) else []
    gloo = times_faster(point, ours, "gloo")
    return " · ".join(_ratio(ratio) for ratio in [*ratios, *([gloo] if gloo is not None else [])]) or "-"


def _ratio(ratio: float | None) -> str:
    """Three digits; a loss is bold.

    Example:
      >>> _ratio(3.14159), _ratio(0.994), _ratio(1234.5), _ratio(None)
      ('3.14', '**0.99**', '1234', '-')
    """
    if ratio is None:
        return "-"
    text = f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.3g}" if ratio >= 1 else f"{ratio:.2f}"
    return f"**{text}**" if ratio < 1 else text


def _half(point: Point) -> str:
    found = times_faster(point, AS_FLOAT32, "shared")
    return "-" if found is None else f"{found:.2f}"


def _losing(found: Sequence[Result]) -> str:
    """Every cell in which a rival is faster."""
    rows = list(_losing_rows(found))
    if not rows:
        return f"## {SLOWER}\n\nIn no cell of these runs."
    heads = _row(["ranks", "cell", "ours", "rival", "times faster", "of a round: least to most"])
    lines = [heads, _row(["---"] * 4 + ["---:"] * 2), *rows]
    return f"## {SLOWER}\n\n" + "\n".join(lines)


def _losing_rows(found: Sequence[Result]) -> Iterator[str]:
    for result in found:
        for point, ours, rival in results.lost_cells(result.points):
            ratio, rounds = times_faster(point, ours, rival), results.spread(point, ours, rival)
            name = result.mpi if rival == "mpi4py" else rival
            mark = " †" if point.disturbed else ""
            low_high = f"{rounds[0]:.2f} to {rounds[1]:.2f}" if rounds else "-"
            yield _row([str(result.ranks), f"{point.cell}{mark}", NAMES[ours], name, _ratio(ratio), low_high])


def _imports(found: Sequence[Result]) -> str:
    timed = [result for result in found if result.import_ms]
    if not timed:
        return ""
    first = timed[0].import_ms or {}
    return (
        f"## Import\n\n`import numpy` takes {first['numpy']:.0f} ms and `from samestep import *`, which imports NumPy, "
        f"{first['samestep']:.0f} ms: {first['added']:.0f} ms more (medians of {first['pairs']} pairs of new "
        "interpreters)."
    )


def _left_out(found: Sequence[Result]) -> str:
    """What contenders could not do, once each."""
    rows: dict[str, None] = {}
    for result in found:
        for what, why in result.absent.items():
            rows[f"- {what}, with {result.mpi}: {' '.join(why.split())}"] = None
    return "## Left out\n\n" + "\n".join(rows) if rows else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page and its figures; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--page", type=Path, default=PAGE, help="(%(default)s)")
    parser.add_argument("--stdout", action="store_true", help="print the tables, write nothing")
    flags = parser.parse_args(argv)
    try:
        found = [results.load(path) for path in flags.results]
        text = render(found)
        if flags.stdout:
            print(text)
            return 0
        flags.page.write_text(page(flags.page.read_text(), text))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    _write_figures(found, flags.page.parent / FIGURES)
    print(f"wrote {flags.page}")
    return 0


def _write_figures(found: Sequence[Result], folder: Path) -> None:
    import plots

    folder.mkdir(parents=True, exist_ok=True)
    for ranks, runs in by_ranks(found).items():
        plots.relative_times(runs[0], runs[1] if len(runs) > 1 else None, folder / f"{ranks}-ranks.svg")


if __name__ == "__main__":
    sys.exit(main())

"""The figure of README, from committed results: a call, and a training step.

python benchmarks/headline.py [--output docs/assets/headline.svg]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import ddp_step
import results

HERE = Path(__file__).parent
CALLS = HERE / "results" / "openmpi-2.json"
STEPS = HERE / "results" / "ddp" / "2.json"
OUTPUT = HERE.parent / "docs" / "assets" / "headline.svg"

# Okabe and Ito's colours, as in plots.py.
OURS, GLOO, MPI = "#0072B2", "#D55E00", "#767676"
INK = "#767676"  # readable on white and on black: README is shown on both

STYLE = {
    "svg.hashsalt": "samestep",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


def calls(axes: Any, run: results.Result) -> None:
    """Draws microseconds of an all-reduce by size: back to back up to 4 KiB, single calls above."""
    axes.set(xscale="log", yscale="log", title=f"allreduce of float32, {run.ranks} ranks, one host")
    lines = (
        ("gloo", "gloo (torch)", GLOO, "^"),
        ("mpi4py", run.mpi, MPI, "D"),
        ("samestep", "samestep", OURS, "o"),
    )
    for name, label, color, marker in lines:
        points = [
            (point.cell.nbytes, point.summaries[name].median_us)
            for point in run.points
            if (point.cell.verb, point.cell.dtype) == ("allreduce", "float32")
            and point.cell.mode == ("b2b" if point.cell.nbytes <= 4096 else "single")
            and name in point.summaries
        ]
        axes.plot(*zip(*sorted(points), strict=True), color=color, marker=marker, label=label)
    sizes = [8, 1 << 10, 64 << 10, 1 << 20, 64 << 20]
    axes.set_xticks(sizes, [results.size(nbytes) for nbytes in sizes])
    axes.minorticks_off()
    axes.set_ylabel("microseconds for each call")
    axes.legend(frameon=False)


def steps(axes: Any, run: dict[str, Any]) -> None:
    """Draws milliseconds that a step of DDP waits for communication, by the number of parameters."""
    axes.set_title(f"DDP: what a step waits for gradients, {run['ranks']} ranks")
    for column, (name, color) in enumerate((("gloo", GLOO), ("samestep", OURS))):
        left = [i + 0.36 * column for i in range(len(run["sizes"]))]
        found = [ddp_step.exposed(cell, name) for cell in run["sizes"].values()]
        middle = [max(value, 0.0) for value, _, _ in found]
        spread = [
            [m - max(low, 0.0) for m, (_, low, _) in zip(middle, found, strict=True)],
            [max(high, 0.0) - m for m, (_, _, high) in zip(middle, found, strict=True)],
        ]
        axes.bar(
            left, middle, 0.34, yerr=spread, color=color, label=name, error_kw={"linewidth": 1, "ecolor": INK}
        )
    axes.set_xticks(
        [i + 0.18 for i in range(len(run["sizes"]))], [f"{millions} M" for millions in run["sizes"]]
    )
    axes.set_xlabel("parameters")
    axes.set_ylabel("milliseconds (95 % interval)")
    axes.legend(frameon=False, loc="upper left")


def main() -> None:
    """Writes the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=OUTPUT, help="(%(default)s)")
    output = parser.parse_args().output
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update(STYLE)
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.1), layout="constrained")
    calls(left, results.load(CALLS))
    steps(right, json.loads(STEPS.read_text()))
    metadata = {"Date": None} if output.suffix == ".svg" else None
    figure.savefig(output, dpi=140, transparent=True, metadata=metadata)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()

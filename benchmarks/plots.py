"""Figures of relative times: one panel for each verb."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import MIB, OURS, Cell, Point, Result, size, spread, times_faster

BACK_TO_BACK = 4096
"""Up to here calls back to back are drawn, above it single calls."""

_COLUMNS = 3
_LOW, _HIGH = 1 / 16, 8.0  # of the axis; what lies beyond is drawn as a triangle at its edge

# Okabe and Ito's colours, distinct with any colour vision; the markers tell the same in grey.
_STYLES: dict[str, dict[str, Any]] = {
    "samestep": {"color": "#0072B2", "marker": "o"},
    "shared": {"color": "#009E73", "marker": "s"},
    "gloo": {"color": "#D55E00", "marker": "^"},
    "limit": {"color": "#000000", "marker": "", "linestyle": ":"},
    "other": {"color": "#CC79A7", "marker": "D", "linestyle": "--"},
}
_LABELS = {
    "samestep": "samestep, non-shared arrays",
    "shared": "samestep, backend.empty",
    "gloo": "gloo (torch)",
    "limit": "the least passes over memory",
}

Curve = list[tuple[int, float]]


def curve(points: Sequence[Point], verb: str, name: str, rival: str = "mpi4py") -> Curve:
    """(bytes, time relative to the rival's) by size: back to back up to 4 KiB, single calls above. Pure."""
    found = []
    for point in _of(points, verb):
        ratio = times_faster(point, name, rival)
        if ratio is not None:
            found.append((point.cell.nbytes, 1 / ratio))
    return sorted(found)


def beside(result: Result, other: Result, verb: str) -> Curve:
    """The same for mpi4py of another run: its median over this run's."""
    found = []
    for point in _of(result.points, verb):
        there = other.find(point.cell)
        if there and "mpi4py" in there.summaries and "mpi4py" in point.summaries:
            ratio = there.summaries["mpi4py"].median_us / point.summaries["mpi4py"].median_us
            found.append((point.cell.nbytes, ratio))
    return sorted(found)


def _of(points: Sequence[Point], verb: str) -> list[Point]:
    def drawn(cell: Cell) -> bool:
        mode = "b2b" if cell.nbytes <= BACK_TO_BACK else "single"
        return (cell.verb, cell.dtype, cell.mode) == (verb, "float32", mode)

    return [point for point in points if drawn(point.cell)]


def relative_times(result: Result, other: Result | None, path: Path) -> None:
    """Draws every verb that was measured at several sizes, relative to mpi4py; written to `path`.

    Args:
      result: one run.
      other: a run with another MPI library on as many ranks, whose mpi4py is drawn as well.
      path: its ending decides the format.
    """
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "samestep"  # else each file differs from the last one
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot as plt

    verbs = _verbs(result.points)
    columns = min(_COLUMNS, max(1, len(verbs)))
    rows = max(1, -(-len(verbs) // columns))
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(1.2 + 3.7 * columns, 1.2 + 2.9 * rows),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for panel, verb in zip(axes.flat, verbs, strict=False):
        _panel(panel, result, other, verb)
    for panel in list(axes.flat)[len(verbs) :]:
        panel.remove()
    for row in axes:
        row[0].set_ylabel(f"time / {result.mpi}'s\n(below 1: faster)")
    handles = {
        label: h for panel in axes.flat for h, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    cores = result.machine["usable_cores"]
    figure.suptitle(
        f"{result.ranks} ranks on {cores} cores, float32, against mpi4py on {result.mpi}\n"
        "up to 4 KiB calls back to back, above (white) single calls; bars: from the best to the worst round"
        + ("; hollow: disturbed" if any(point.disturbed for point in result.points) else ""),
        fontsize=9,
    )
    figure.savefig(path, dpi=140, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _verbs(points: Sequence[Point]) -> list[str]:
    sizes: dict[str, set[int]] = {}
    for point in points:
        if point.cell.dtype == "float32":
            sizes.setdefault(point.cell.verb, set()).add(point.cell.nbytes)
    return [verb for verb, found in sizes.items() if len(found) > 1]


def _panel(axes: Any, result: Result, other: Result | None, verb: str) -> None:
    axes.set(xscale="log", title=verb)
    axes.set_yscale("log", base=2)
    axes.axhline(1, color="#555555", linewidth=1.2)
    for name in ("gloo", "limit", *OURS):
        _draw(axes, curve(result.points, verb, name), _LABELS[name], _STYLES[name])
        if name in OURS:
            _bars(axes, result.points, verb, name)
    if other:
        _draw(
            axes, beside(result, other, verb), f"mpi4py on {other.mpi} (a run of its own)", _STYLES["other"]
        )
    sizes = sorted({point.cell.nbytes for point in _of(result.points, verb)})
    axes.axvspan(min(sizes) / 2, 2 * BACK_TO_BACK, color="#000000", alpha=0.05, linewidth=0)
    axes.set_xlim(min(sizes) / 2, max(*sizes, MIB) * 2)
    axes.set_ylim(_LOW, _HIGH * 1.15)
    axes.set_yticks([2.0**k for k in range(-4, 4)], ["1/16", "1/8", "1/4", "1/2", "1", "2", "4", "8"])
    axes.set_xticks(sizes, [size(nbytes) for nbytes in sizes], rotation=60, ha="right", fontsize=7)
    axes.tick_params(axis="y", labelsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.25)


def _draw(axes: Any, found: Curve, label: str, style: dict[str, Any]) -> None:
    if not found:
        return
    inside = [(x, min(max(y, _LOW), _HIGH)) for x, y in found]
    axes.plot(*zip(*inside, strict=True), label=label, markersize=4, linewidth=1.4, **style)
    for x, y in found:
        if not _LOW <= y <= _HIGH:
            edge, marker = (_HIGH, 6) if y > _HIGH else (_LOW, 7)  # carets up and down
            axes.plot(x, edge, marker=marker, color=style["color"], markersize=7, clip_on=False)


def _bars(axes: Any, points: Sequence[Point], verb: str, name: str) -> None:
    """From the best to the worst round; a hollow mark where others disturbed every round."""
    for point in _of(points, verb):
        found = spread(point, name, "mpi4py")
        if found:
            low, high = (min(max(1 / ratio, _LOW), _HIGH) for ratio in reversed(found))
            colour, x = _STYLES[name]["color"], point.cell.nbytes
            axes.plot([x, x], [low, high], color=colour, alpha=0.5, linewidth=2.5)
            if point.disturbed:
                here = min(max(1 / (times_faster(point, name, "mpi4py") or 1), _LOW), _HIGH)
                axes.plot(
                    x, here, marker=_STYLES[name]["marker"], markersize=4, color=colour, mfc="white", zorder=3
                )

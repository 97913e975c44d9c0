"""Measurements as a table, and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness import Point, Summary

_COLOURS = ("#666666", "#0b6fb8", "#d1495b", "#2e8b57", "#8e5ea2")
_COLUMNS = 3


def size(nbytes: int) -> str:
    """Bytes for people, exact.

    Example:
      >>> size(8), size(65536), size(1 << 20), size(2_000_000)
      ('8 B', '64 KiB', '1 MiB', '2000000 B')
    """
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def microseconds(value: float) -> str:
    """Three digits, never an exponent.

    Example:
      >>> microseconds(0.4237), microseconds(48.26), microseconds(44503.2)
      ('0.424', '48.3', '44503')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def ratio(point: Point, name: str) -> float | None:
    """Time of a contender relative to the first one; None where either was not measured."""
    first = next(iter(point.summaries.values()), None)
    found = point.summaries.get(name)
    return found.median_us / first.median_us if found and first else None


def header(names: Sequence[str]) -> str:
    """The title lines of the table."""
    columns = "".join(f"{name:>22}" for name in names)
    ratios = "".join(f"{name + '/' + names[0]:>20}" for name in names[1:])
    rule = f"{'us per call: median (p99), longest of the ranks':>{31 + 22 * len(names)}}"
    return f"{rule}\n{'verb':<15}{'size':>9} {'mode':<6}{columns}{ratios}"


def row(point: Point, names: Sequence[str]) -> str:
    """One line of the table."""
    cells = "".join(f"{_times(point.summaries.get(name)):>22}" for name in names)
    ratios = "".join(f"{_ratio(point, name):>20}" for name in names[1:])
    shown = size(point.nbytes) if point.nbytes else ""
    note = f"  DISTURBED: others used {point.others:.2f} cores" if point.disturbed else ""
    return f"{point.verb:<15}{shown:>9} {point.mode:<6}{cells}{ratios}{note}"


def _times(found: Summary | None) -> str:
    return f"{microseconds(found.median_us)} ({microseconds(found.p99_us)})" if found else "-"


def _ratio(point: Point, name: str) -> str:
    found = ratio(point, name)
    return "-" if found is None else f"{found:.2f}"


def plot(points: Sequence[Point], names: Sequence[str], title: str, path: Path) -> None:
    """Time and relative time against size, a pair of panels for each verb, written to `path`.

    Hollow dots: the machine was disturbed.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    verbs = _verbs_with_curves(points)
    columns = min(_COLUMNS, max(1, len(verbs)))
    rows = max(1, -(-len(verbs) // columns))
    figure = plt.figure(figsize=(5.2 * columns, 5.6 * rows + 0.6), layout="constrained")
    note = (
        "\nhollow dots: other processes disturbed the measurement" if any(p.disturbed for p in points) else ""
    )
    figure.suptitle(title + note, fontsize=9, wrap=True)
    heights = [3, 2] * rows
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=heights)
    for i, verb in enumerate(verbs):
        line, column = divmod(i, columns)
        above = figure.add_subplot(grid[2 * line, column])
        below = figure.add_subplot(grid[2 * line + 1, column], sharex=above)
        _panels(above, below, [point for point in points if point.verb == verb], names)
        above.set_title(verb)
    if verbs:
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
        )
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _verbs_with_curves(points: Iterable[Point]) -> list[str]:
    """Verbs in order of first appearance; those measured at one size only are left to the table."""
    sizes: dict[str, set[int]] = {}
    for point in points:
        sizes.setdefault(point.verb, set()).add(point.nbytes)
    return [verb for verb, found in sizes.items() if len(found) > 1]


def _panels(above: Any, below: Any, points: Sequence[Point], names: Sequence[str]) -> None:
    modes = [mode for mode in ("single", "b2b") if any(point.mode == mode for point in points)]
    for mode in modes:
        style = "-" if mode == "single" else "--"
        for name, colour in zip(names, _COLOURS, strict=False):
            curve = [point for point in points if point.mode == mode and name in point.summaries]
            x = [point.nbytes for point in curve]
            label = name if mode == "single" else f"{name}, back to back"
            times = [point.summaries[name].median_us for point in curve]
            above.plot(x, times, style, color=colour, label=label)
            _marks(above, curve, times, colour)
            if name != names[0]:
                ratios = [found for point in curve if (found := ratio(point, name)) is not None]
                below.plot(x, ratios, style, color=colour)
                _marks(below, curve, ratios, colour)
    above.set(xscale="log", yscale="log", ylabel="time of a call (us)")
    below.axhline(1, color=_COLOURS[0], linewidth=1)
    below.set(xscale="log", xlabel="size", ylabel=f"time / {names[0]}'s\n(below 1: faster)")
    below.set_yscale("log", base=2)
    low, high = below.get_ylim()
    below.set_ylim(min(low, 0.4), max(high, 2.5))
    below.yaxis.set_major_formatter("{x:.3g}")
    ticks = sorted({point.nbytes for point in points})
    below.set_xticks(ticks, [size(nbytes) for nbytes in ticks], rotation=60, ha="right", fontsize=7)
    below.minorticks_off()
    above.tick_params(axis="x", labelbottom=False)
    for axes in (above, below):
        axes.grid(alpha=0.3)


def _marks(axes: Any, curve: Sequence[Point], values: Sequence[float], colour: str) -> None:
    """A dot at each point; hollow where the machine was disturbed."""
    for point, value in zip(curve, values, strict=True):
        face = "white" if point.disturbed else colour
        axes.plot(point.nbytes, value, "o", markersize=4, color=colour, markerfacecolor=face)

"""Measurements as lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from results import AS_FLOAT32, LIMIT, OURS, Point, Summary, left_out, microseconds, size, times_faster


def header(names: Sequence[str]) -> str:
    """The title lines of the table."""
    columns = "".join(f"{name:>20}" for name in names)
    rule = f"{'us per call: median (p99), the slowest rank counts':>{31 + 20 * len(names)}}"
    return f"{rule}\n{'verb':<22}{'size':>9} {'mode':<6}{columns}   {names[0]} / {', '.join(_ours(names))}"


def row(point: Point, names: Sequence[str]) -> str:
    """One line of the table. Ratios are times faster than the first contender."""
    cells = "".join(f"{_times(point.summaries.get(name)):>20}" for name in names)
    ratios = " ".join(f"{_ratio(point, name, names[0]):>7}" for name in _ours(names))
    cell = point.cell
    verb = cell.verb if cell.dtype == "float32" else f"{cell.verb} {cell.dtype}"
    shown = size(cell.nbytes) if cell.nbytes else ""
    return f"{verb:<22}{shown:>9} {cell.mode:<6}{cells}   {ratios}{_half(point)}{note(point)}"


def _half(point: Point) -> str:
    found = times_faster(point, AS_FLOAT32, "shared")
    return "" if found is None else f"  shared: {found:.2f} of the time of as many float32"


def note(point: Point) -> str:
    """What other processes did to it; "" for nothing."""
    if point.disturbed:
        return f"  DISTURBED: others used {point.others:.2f} cores"
    made = point.rounds + point.left_out
    return f"  {point.left_out} of {made} rounds disturbed, left out" if point.left_out else ""


def summary(points: Sequence[Point]) -> str:
    """How quiet the machine was."""
    out, made = left_out(points)
    noisy = sum(point.disturbed for point in points)
    return (
        f"{len(points)} cells; {out} of {made} rounds left out as other processes disturbed them; "
        f"{noisy} cells DISTURBED"
    )


def _ours(names: Sequence[str]) -> list[str]:
    return [name for name in names[1:] if name in OURS or name not in (LIMIT, "gloo")]


def _times(found: Summary | None) -> str:
    return f"{microseconds(found.median_us)} ({microseconds(found.p99_us)})" if found else "-"


def _ratio(point: Point, name: str, rival: str) -> str:
    found = times_faster(point, name, rival)
    return "-" if found is None else f"{found:.3g}x"

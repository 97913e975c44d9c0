"""Markdown tables of what kit.sh has found: `summary.py results.json`, or `summary.py --figures results.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_EXTRA_US = {1: 2.0, 2: 3.0}  # of a blocking call, over a raw one on a communicator that blocks, by ranks
MOST_EXTRA_ASYNC_US = 5.0  # of one that does not block
LEAST_STAGING = 0.80  # of what copies and the host alone allow
MOST_EXPOSED = 1.0  # communication of a step that is not hidden, over that of torch's DDP

SHARED = " Two ranks share the device: compare their times with each other only."

GRANULE = 2 << 20  # bytes that the driver's own pools may grow by

Found = Mapping[str, Any]


def page(found: Found) -> str:
    """The whole summary."""
    sections = [_head(found), goals(found), _parts(found), *_timings(found)]
    return "\n\n".join(section for section in sections if section) + "\n"


def figures(found: Found) -> str:
    """What was measured, for a page of the documentation."""
    sections = [_head(found), goals(found), *_timings(found)]
    text = "\n\n".join(section for section in sections if section) + "\n"
    return text.replace("# A GPU\n", "").replace("## ", "### ")


def rows_of(found: Found, what: str) -> list[dict[str, Any]]:
    """Results of one kind, as rank 0 reported them."""
    parts = found["parts"].values()
    return [row for part in parts for row in part["results"] if row["what"] == what and row["rank"] == 0]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of Markdown, or "" without rows.

    Example:
      >>> print(table(["size", "us"], [["4 B", 3.25]]))
      | size | us |
      |---|---|
      | 4 B | 3.25 |
    """
    if not rows:
        return ""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(_cell, row)) + " |" for row in rows)])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return str(value)


def size(nbytes: int) -> str:
    """Bytes for people.

    Example:
      >>> size(4), size(65536), size(64 << 20)
      ('4 B', '64 KiB', '64 MiB')
    """
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}" if nbytes % unit == 0 else f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"


def _head(found: Found) -> str:
    doctor, device = found["machine"]["doctor"], found["machine"]["device"]
    libraries = ", ".join(f"{name} {number}" for name, number in doctor.get("libraries", {}).items())
    lines = [
        "# A GPU",
        "**On the stand-ins: the times mean nothing.**" if found["fakes"] else "",
        f"Device: {device or doctor.get('devices', {}).get('cuda', {}).get('detail', 'none')}.",
        f"{doctor.get('nccl', {}).get('detail', 'no NCCL')}; {libraries}; {found['seconds']} s in all.",
        f"Ranks share the device by {found['sharing']}.",
    ]
    return "\n".join(line for line in lines if line)


def _parts(found: Found) -> str:
    rows = [
        [name, part["status"], part.get("seconds", ""), part["reason"] or _told(part["results"])]
        for name, part in found["parts"].items()
    ]
    return "## Parts\n\n" + table(["part", "", "s", ""], rows)


def _told(results: Sequence[Found]) -> str:
    for row in results:
        if row["what"] == "verbs":
            skipped = f"; without {', '.join(row['dtypes_skipped'])}" if row["dtypes_skipped"] else ""
            return f"{row['checked']} results compared on each rank, {len(row['wrong'])} wrong{skipped}"
        if row["what"] == "streams":
            return f"{row['turns']} turns, {row['wrong']} wrong"
        if row["what"] == "failures":
            seen = ", ".join(f"{name} {value}" for name, value in row["seen"].items())
            wrong = [text for each in results for text in each["wrong"]]
            return "; ".join([*dict.fromkeys(wrong), seen])
        if row["what"] == "lifetimes":
            grown = ", ".join(f"{name} {number:+}" for name, number in row["grown"].items())
            return (
                f"{row['turns']} of {row['wanted']} turns, each {1000 * row['seconds_each']:.0f} ms; {grown}"
            )
    return ""


# ---- goals


def goals(found: Found) -> str:
    """What was to be reached, and whether it was."""
    rows = [[goal, value, "reached" if good else "**missed**"] for goal, value, good in judged(found)]
    return "## Goals\n\n" + table(["goal", "measured", ""], rows) if rows else ""


def judged(found: Found) -> Iterator[tuple[str, str, bool]]:
    """Each goal that something was measured for, what, and whether it is reached. Pure."""
    for ranks, most in MOST_EXTRA_US.items():
        small = next((row for row in rows_of(found, "overhead") if row["ranks"] == ranks), None)
        if small is None:
            continue
        times, of = small["times"], "one rank" if ranks == 1 else f"{ranks} ranks"
        raw = times["raw"]["call_us"]
        for name, what, extra in (
            ("samestep blocking", "a blocking call", most),
            ("samestep", "a call that is waited for", MOST_EXTRA_ASYNC_US),
        ):
            ours = times[name]["call_us"]
            yield (
                f"{what} of {of} costs at most {extra:.0f} us more than ncclAllReduce",
                f"{ours:.1f} us against {raw:.1f} us",
                ours <= raw + extra,
            )
        for kind in ("in place", "blocking in place"):
            if f"torch {kind}" not in times:
                continue
            ours, torch = times[f"samestep {kind}"]["call_us"], times[f"torch {kind}"]["call_us"]
            yield (
                f"a call {kind} of {of} costs less than torch's",
                f"{ours:.1f} us against {torch:.1f} us",
                ours < torch,
            )
    for row in rows_of(found, "waiting"):
        waited = {name: count for name, count in row["waited"].items() if count}
        yield "no call waits for the device", f"{waited or 'none did'}", not waited
    for row in rows_of(found, "staging"):
        times = row["times"]
        n = segments(row["nbytes"])
        chain = [times[name]["whole_us"] / n for name in ("copy there", "host", "copy back")]
        share = staging_bound(chain, n) / times["staged"]["whole_us"]
        of = (
            f"{n} segments, each copied, reduced and copied back"
            if n > 1
            else "a copy, a reduction and a copy"
        )
        goal = f"{size(row['nbytes'])} through the host at {LEAST_STAGING:.0%} of the speed of {of}"
        yield goal, f"{share:.0%}", share >= LEAST_STAGING
    for row in rows_of(found, "step"):
        times = row["times"]
        if "torch DDP" in times and row["ranks"] > 1:
            exposed = {
                name: times[name]["whole_us"] - times["alone"]["whole_us"]
                for name in ("samestep", "torch DDP")
            }
            # Ranks that share a device take turns on it, and their messages go through sockets.
            yield (
                "a step exposes no more communication than torch's DDP"
                " (one against the other only: the ranks share a device, so neither time is that of two devices)",
                f"{exposed['samestep'] / max(exposed['torch DDP'], 1.0):.2f} times",
                exposed["samestep"] <= MOST_EXPOSED * max(exposed["torch DDP"], 1.0),
            )
    for row in rows_of(found, "lifetimes"):
        grown = row["grown"]
        most = {"device": 0 if found["fakes"] else GRANULE, "threads": 0, "files": 0}
        left = {name: grown[name] for name in most if grown[name] > most[name]}
        goal = "nothing is left after ranks have ended"
        yield goal, f"{row['turns']} turns: {left or 'nothing'}", not left


def segments(nbytes: int) -> int:
    """In how many an array goes through the host, as csrc/device/host_path.cpp divides it. Pure.

    Example:
      >>> [segments(n << 10) for n in (4, 300, 512, 1024, 65536)]
      [1, 1, 2, 4, 16]
    """
    return max(min(nbytes // (256 << 10), 4), -(-nbytes // (4 << 20)), 1)


def staging_bound(chain: Sequence[float], n: int) -> float:
    """The least time for `n` segments with these steps: one after another the first, then the slowest of each. Pure.

    Example:
      >>> staging_bound([51.0, 114.0, 47.0], 1)
      212.0
      >>> staging_bound([12.75, 28.5, 11.75], 4)
      138.5
    """
    return sum(chain) + (n - 1) * max(chain)


# ---- times


def _timings(found: Found) -> Iterator[str]:
    yield _section(
        "Allreduce, until the call returns",
        found,
        "overhead",
        "nbytes",
        measure="call_us",
        unit="us until the call returns",
    )
    yield _section(
        "Allreduce, until the first call after a wait for the device returns",
        found,
        "overhead",
        "nbytes",
        measure="cold_us",
        unit="us until the call returns",
    )
    yield _section(
        "Allreduce, until it has ended",
        found,
        "overhead",
        "nbytes",
        measure="whole_us",
        unit="us",
        note=SHARED,
    )
    yield _section("Through the host, two ranks", found, "staging", "nbytes", measure="whole_us", unit="us")
    yield _section("Many small arrays", found, "trees", "leaves", measure="whole_us", unit="us")
    yield _section("A step of training", found, "step", "", measure="whole_us", unit="us", note=SHARED)


def _section(
    title: str, found: Found, what: str, key: str, *, measure: str, unit: str, note: str = ""
) -> str:
    rows = rows_of(found, what)
    names = list(dict.fromkeys(name for row in rows for name in row["times"]))

    def label(row: Found) -> str:
        ranks = f", {row['ranks']} ranks" if row.get("ranks", 1) > 1 else ""
        return size(row[key]) + ranks if key == "nbytes" else str(row.get(key, "")) + ranks

    lines = [
        [label(row), *(row["times"].get(name, {}).get(measure, "") for name in names)]
        for row in rows
        if any(measure in times for times in row["times"].values())
    ]
    made = table(["", *names], lines)
    return f"## {title}\n\nIn {unit}; medians.{note}\n\n{made}" if made else ""


if __name__ == "__main__":
    what = figures if sys.argv[1] == "--figures" else page
    sys.stdout.write(what(json.loads(Path(sys.argv[-1]).read_text())))

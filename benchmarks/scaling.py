#!/usr/bin/env python3
"""Reductions over hosts: measured in namespaces of this machine, and predicted for real ones.

    sudo python benchmarks/scaling.py measure     # benchmarks/results/hosts.json; needs root, a minute and a half
    python benchmarks/scaling.py report           # docs/scaling.md (its table) and docs/assets/scaling.svg

`measure` takes the prices of `cost_model.Network` from barriers and from two hosts with a rank each, and times
allreduce in each of its ways on more. `--realtime` lets the ranks go before the machine's other work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
import cost_model as cost  # noqa: E402
from cost_model import KIB, MIB  # noqa: E402
from scaling_programs import PRICES, TIMES  # noqa: E402

RESULTS = ROOT / "benchmarks/results/hosts.json"
PAGE, FIGURE = ROOT / "docs/scaling.md", ROOT / "docs/assets/scaling.svg"
FREE, NO_LIMIT = "none", 1e15  # bytes/s; what counts then is the processor's time for messages
RATES = (FREE, "1gbit")
HOSTS = (2, 3, 4, 6, 8)
SIZES = (KIB, 4 * KIB, 16 * KIB, 64 * KIB)
LIMITED_SIZES = (256 * KIB, MIB, 4 * MIB)  # where the line is what takes time
BATCH_S = 0.08  # of allreduces one after the other; at least three batches

# What clusters are made of. The processor's prices are those of the machine that `measure` ran on.
CLUSTERS = {
    "10 Gbit/s": {"latency_s": 15e-6, "bandwidth": 1.19e9},
    "100 Gbit/s": {"latency_s": 10e-6, "bandwidth": 11.9e9},
}
RANKS = 8
GRADIENTS, COMPUTE_S = 100 * MIB, 0.25
FAR = tuple(8 * 2**i for i in range(10))  # 8 to 4,096 hosts


def measure(*, realtime: bool) -> dict[str, Any]:
    """Prices at each rate, and times of allreduce with what the formulas say."""
    sys.path.insert(0, str(ROOT / "tests/hosts"))
    import lab as labs

    if reason := labs.missing():
        raise SystemExit(f"scaling.py: {reason}")
    found: dict[str, Any] = {"processors": len(os.sched_getaffinity(0)), "prices": {}, "times": []}
    lab = labs.Lab(max(HOSTS))
    try:
        with tempfile.TemporaryDirectory() as folder:

            def job(script: str, n: int, way: str = "direct") -> list[dict[str, Any]]:
                text = f"REALTIME, BATCH_S = {realtime}, {BATCH_S}\n{script}"
                made = labs.Job(lab, Path(folder), text, [1] * n, SAMESTEP_ALGORITHM=way)
                try:
                    texts = [process.stdout.read() for process in made.processes.values()]
                    return [json.loads(line) for line in texts[0].splitlines()]
                finally:
                    made.end()

            found.update(
                messages_of({n: job("SIZES = ()" + TIMES, n)[0] for n in HOSTS}, found["processors"])
            )
            # The line's price is seen on more than its limiter lets through at once, a copy's on what is in the cache.
            free = job(f"LONG = {MIB}" + PRICES, 2)[0]
            for rate in RATES:
                for host in range(max(HOSTS) if rate != FREE else 0):
                    lab.limit(host, rate)
                limited = job(f"LONG = {16 * MIB}" + PRICES, 2)[0] if rate != FREE else None
                network = network_of(found["message_s"], free, limited, found["processors"])
                found["prices"][rate] = asdict(network)
                for n, way in itertools.product(HOSTS, cost.IN_USE):
                    sizes = f"SIZES = {SIZES if rate == FREE else LIMITED_SIZES}\n"
                    for line in job(sizes + TIMES, n, way):
                        found["times"].append({"rate": rate, "hosts": n, "way": way, **line})
                        print(describe(found, [found["times"][-1]]), flush=True)
    finally:
        lab.close()
    return found


def messages_of(times: Mapping[int, Mapping[str, float]], processors: int) -> dict[str, Any]:
    """What a message costs ranks that share processors. Pure.

    Args:
      times: by the number of ranks, the seconds of a "barrier", of n - 1 messages of each rank at once, and of a
        "shift", in which each rank sends one message and waits for one.
      processors: of the machine.

    Returns:
      "message_s", of the processor at each end, and "waits": by the number of ranks, for one message.

    Example:
      >>> messages_of({4: {"barrier": 14.0, "shift": 6.0}}, processors=2)
      {'message_s': 1.0, 'waits': {4: 2.0}}
    """
    turns = {n: max(1.0, n / processors) for n in times}
    more = [(times[n]["barrier"] - times[n]["shift"]) / (2 * (n - 2) * turns[n]) for n in times if n > 2]
    message_s = statistics.median(more)
    waits = {n: max(0.0, times[n]["shift"] - 2 * message_s * turns[n]) for n in times}
    return {"message_s": message_s, "waits": waits}


def network_of(
    message_s: float, free: Mapping[str, float], limited: Mapping[str, float] | None, processors: int
) -> cost.Network:
    """The prices, from what two hosts measured at full speed and, if there is a limit, at the limited rate. Pure."""
    return cost.Network(
        latency_s=0.0,  # there is no line; ranks that share processors wait for each other, see "waits"
        message_s=message_s,
        bandwidth=1 / limited["both_ways"] if limited is not None else NO_LIMIT,
        copy_s=free["both_ways"] / 2,
        reduce_s=free["reduce"],
        processors=processors,
    )


def predicted(found: Mapping[str, Any], time: Mapping[str, Any]) -> float:
    """Seconds that the formulas say for a measured time. The hosts of a lab share its machine's processors."""
    network = cost.Network(**found["prices"][time["rate"]])
    n, nbytes = time["hosts"], time["nbytes"]
    wait_s = {int(ranks): price for ranks, price in found["waits"].items()}[n]
    shared = replace(network, processors=network.processors / n, latency_s=wait_s)
    return cost.flat(
        shared, n, 1, nbytes, cost.SHORT if cost.chosen(n, nbytes) == cost.SHORT else time["way"]
    )


def describe(found: Mapping[str, Any], times: Sequence[Mapping[str, Any]]) -> str:
    """Measured times of the ways, at one rate, number of hosts and size, as a row of the page."""
    first = times[0]
    cells = [first["rate"], str(first["hosts"]), size(first["nbytes"])]
    if cost.chosen(first["hosts"], first["nbytes"]) == cost.SHORT:
        times = [min(times, key=lambda time: time["seconds"])]  # the same, three times
    for time in times:
        says = predicted(found, time)
        cells.append(f"{time['seconds'] * 1e3:.3g} ({(says / time['seconds'] - 1) * 100:+.0f} %)")
    cells += [""] * (6 - len(cells))
    return "| " + " | ".join(cells) + " |"


def size(nbytes: int) -> str:
    """A number of bytes for people.

    Example:
      >>> size(128), size(2048), size(4 * MIB)
      ('128', '2 KiB', '4 MiB')
    """
    return next(
        (f"{nbytes // unit} {name}" for unit, name in ((MIB, "MiB"), (KIB, "KiB")) if nbytes >= unit),
        str(nbytes),
    )


def rows(found: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """The measured times of each rate, number of hosts and size, in the order of the ways."""
    together: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for time in found["times"]:
        together.setdefault((time["rate"], time["hosts"], time["nbytes"]), []).append(time)
    return list(together.values())


def table(found: Mapping[str, Any]) -> str:
    """All measured times, how far off the predicted ones are, and how often the cheapest is the fastest."""
    off = {id(time): abs(predicted(found, time) / time["seconds"] - 1) for time in found["times"]}
    lines = "\n".join(describe(found, row) for row in rows(found))
    within = sum(error <= 0.25 for error in off.values())
    shares = []
    for most in sorted({time["nbytes"] for time in found["times"]}):
        errors = [off[id(time)] for time in found["times"] if time["nbytes"] == most]
        shares.append(f"{size(most)} {sum(error <= 0.25 for error in errors)} of {len(errors)}")
    choices = [row for row in rows(found) if cost.chosen(row[0]["hosts"], row[0]["nbytes"]) != cost.SHORT]
    lost = [
        min(row, key=lambda time: predicted(found, time))["seconds"] / min(time["seconds"] for time in row)
        for row in choices
    ]
    fastest = sum(factor == 1 for factor in lost)
    return (
        "| card | hosts | buffer | direct, ms | halving, ms | doubling, ms |\n|---|---|---|---|---|---|\n"
        f"{lines}\n\nIn brackets: how far off the prediction is. {within} of {len(off)} are within 25 %, half of them "
        f"within {statistics.median(off.values()) * 100:.0f} %; the worst is off by "
        f"{max(off.values()) * 100:.0f} %. Within 25 % by size: {', '.join(shares)}. What the formulas say is the "
        f"cheapest is the fastest of the three in {fastest} of {len(lost)} cases, and takes {max(lost):.2f} times as "
        "long as the fastest at worst."
    )


def clusters(found: Mapping[str, Any]) -> dict[str, cost.Network]:
    """The networks that are predicted for."""
    here = cost.Network(**found["prices"][FREE])
    node_s = 4 * here.reduce_s  # written by all and read by all, in memory that they share
    return {name: replace(here, processors=RANKS, node_s=node_s, **facts) for name, facts in CLUSTERS.items()}


def far_table(found: Mapping[str, Any]) -> str:
    """Step times from 8 to 4,096 hosts of 8 ranks."""
    networks = clusters(found)
    head = " | ".join(f"{name}: reduction, step, of it used" for name in networks)
    lines = [f"| hosts | {head} |", "|---" * (1 + len(networks)) + "|"]
    for hosts in FAR:
        cells = []
        for network in networks.values():
            reduction = cost.levels(network, hosts, RANKS, GRADIENTS)
            step = cost.step(network, hosts, RANKS, GRADIENTS, compute_s=COMPUTE_S)
            hidden = cost.step(network, hosts, RANKS, GRADIENTS, compute_s=COMPUTE_S, overlap=0.5)
            used = f"{COMPUTE_S / step * 100:.0f} %, {COMPUTE_S / hidden * 100:.0f} % with overlap"
            cells.append(f"{reduction * 1e3:.0f} ms, {step * 1e3:.0f} ms, {used}")
        lines.append(f"| {hosts:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def choice_table() -> str:
    """From how many bytes on each way is used, by the number of hosts."""
    names = (cost.SHORT, *sorted(cost.IN_USE, key=("doubling", "halving", "direct").index))
    lines = [f"| hosts | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for n in (2, 3, 4, 8, 12, 16, 17, 32, 64, 96, 128, 1024, 4096):
        used = {cost.chosen(n, 2**exponent): 2**exponent for exponent in reversed(range(3, 31))}
        lines.append(f"| {n:,} | {' | '.join(size(used[name]) if name in used else '' for name in names)} |")
    return "\n".join(lines)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Cost of each algorithm between hosts by size, for few and many hosts; the lowest line is the best choice."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "samestep"
    from matplotlib import pyplot as plt

    names = (cost.SHORT, *cost.ALGORITHMS)
    colours = dict(zip(names, ("#0072B2", "#009E73", "#D55E00", "#E69F00", "#CC79A7"), strict=True))
    sizes = [2**i for i in range(3, 31)]
    shown = (2, 16, 128, 1024)
    networks = clusters(found)
    figure, panels = plt.subplots(
        len(networks), len(shown), figsize=(13, 6), sharex=True, sharey=True, layout="constrained"
    )
    for row, (name, network) in zip(panels, networks.items(), strict=True):
        for axes, hosts in zip(row, shown, strict=True):
            for algorithm, colour in colours.items():
                times = [cost.levels(network, hosts, RANKS, size, algorithm) * 1e3 for size in sizes]
                style = "--" if algorithm == "ring" else "-"
                axes.plot(sizes, times, style, color=colour, label=algorithm, linewidth=1)
            used = [cost.levels(network, hosts, RANKS, size) * 1e3 for size in sizes]
            axes.plot(sizes, used, color="black", alpha=0.25, linewidth=5, label="what samestep does")
            axes.set(xscale="log", yscale="log", title=f"{hosts:,} hosts of {RANKS} ranks, {name}")
            axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    figure.supxlabel("bytes of the buffer")
    figure.supylabel("ms")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def fill(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks called `name`. Pure.

    Example:
      >>> fill("a <!-- x -->old<!-- end x --> b", "x", "new")
      'a <!-- x -->\\nnew\\n<!-- end x --> b'
    """
    before, begin, rest = page.partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- end {name} -->")
    if not begin or not end:
        raise ValueError(f"the page has no marks called {name}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["measure", "report"])
    parser.add_argument("--realtime", action="store_true", help="let the ranks go before other work")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the results")
    flags = parser.parse_args(argv)
    if flags.command == "measure":
        found = measure(realtime=flags.realtime)
        flags.json.write_text(json.dumps(found, indent=1) + "\n")
        print(table(found))
        return 0
    found = json.loads(flags.json.read_text())
    draw(found, FIGURE)
    page = fill(fill(PAGE.read_text(), "measured", table(found)), "chosen", choice_table())
    PAGE.write_text(fill(page, "predicted", far_table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env python3
"""Reductions over hosts: measured in namespaces of this machine, and predicted for real ones.

    sudo python benchmarks/scaling.py measure     # benchmarks/results/hosts.json; needs root, four minutes
    python benchmarks/scaling.py report           # docs/scaling.md (its table) and docs/assets/scaling.svg

`measure` takes the prices of `cost_model.Network` from messages between hosts, and times each allreduce algorithm
and steps of a model, for which the formulas say what they should take. `--realtime` lets the ranks go before the
machine's other work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
import cost_model as cost  # noqa: E402
from cost_model import KIB, MIB  # noqa: E402
from scaling_measure import FREE, LIMIT, measure  # noqa: E402

RESULTS = ROOT / "benchmarks/results/hosts.json"
PAGE, FIGURE = ROOT / "docs/scaling.md", ROOT / "docs/assets/scaling.svg"
NEAR = 0.25  # how far off a prediction may be

# What clusters are made of. The processor's prices are those of the machine that `measure` ran on.
CLUSTERS = {
    "10 Gbit/s": {"latency_s": 15e-6, "bandwidth": 1.19e9},
    "100 Gbit/s": {"latency_s": 10e-6, "bandwidth": 11.9e9},
}
RANKS = 8
COMPUTE_S = 0.25
FAR = tuple(8 * 2**i for i in range(10))  # 8 to 4,096 hosts


def lab_network(found: Mapping[str, Any], rate: str, hosts: int) -> cost.Network:
    """Of hosts that share the machine's processors."""
    network = cost.Network(**found["prices"][rate])
    return replace(network, processors=network.processors / hosts)


def predicted(found: Mapping[str, Any], time: Mapping[str, Any]) -> float:
    """Seconds that the formulas say for a measured time of one allreduce."""
    n, nbytes = time["hosts"], time["nbytes"]
    algorithm = cost.SHORT if cost.chosen(n, nbytes) == cost.SHORT else time["algorithm"]
    return cost.flat(lab_network(found, time["rate"], n), n, 1, nbytes, algorithm)


def buckets() -> list[int]:
    """Bytes of the messages that the gradients of the model of the steps travel in."""
    sys.path.insert(0, str(ROOT / "python"))
    from samestep.arrays import ArrayInfo
    from samestep.trees.fusion import plan_messages

    nbytes = [4 * count for count in cost.resnet50()]
    infos = [
        ArrayInfo(("float32", (size // 4,), (4,), size, False, True, "cpu", 0, 0, True)) for size in nbytes
    ]
    return [sum(nbytes[i] for i in message) for message in plan_messages(infos, mix_dtypes=False)]


def predicted_step(found: Mapping[str, Any], step: Mapping[str, Any]) -> float:
    """Seconds that the formulas say for a measured step."""
    hosts, ranks = len(step["each"]), step["each"][0]
    return cost.reductions(lab_network(found, LIMIT, hosts), hosts, ranks, buckets())


def different(times: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Of one rate, number of hosts and size: what is sent with the headers is the same for all algorithms."""
    is_one_shot = cost.chosen(times[0]["hosts"], times[0]["nbytes"]) == cost.SHORT
    return [min(times, key=lambda time: time["seconds"])] if is_one_shot else times


def describe(found: Mapping[str, Any], times: Sequence[Mapping[str, Any]]) -> str:
    """Measured times of the algorithms, at one rate, number of hosts and size, as a row of the page."""
    first = times[0]
    cells = [first["rate"], str(first["hosts"]), size(first["nbytes"])]
    for time in different(times):
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
    """The measured times of each rate, number of hosts and size, in the order of the algorithms."""
    together: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for time in found["times"]:
        together.setdefault((time["rate"], time["hosts"], time["nbytes"]), []).append(time)
    return list(together.values())


def table(found: Mapping[str, Any]) -> str:
    """All measured times, how far off the predicted ones are, and how often the cheapest is the fastest."""
    lines = [
        "| card | hosts | buffer | two_shot, ms | recursive_halving, ms | recursive_doubling, ms |",
        "|---|---|---|---|---|---|",
        *(describe(found, row) for row in rows(found)),
        "",
        "In parentheses: the error of the prediction. A summary by kind, and by how much the slowest of three runs "
        "exceeds the best:",
        "",
        _hits(found),
        "",
        _choices(found),
    ]
    return "\n".join(lines)


def _kind(found: Mapping[str, Any], time: Mapping[str, Any]) -> str:
    if time["rate"] != FREE:
        return f"{size(time['nbytes'])} on a limited line"
    own = time["hosts"] <= found["processors"]
    return "a CPU for each rank, no limit" if own else "shared CPUs, no limit"


def _hits(found: Mapping[str, Any]) -> str:
    """How many predictions are near, and how far runs are from each other, for each kind of measurement."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows(found):
        for time in different(row):
            kinds.setdefault(_kind(found, time), []).append(time)
    lines = [
        "| | error at most 25 % | median error | largest error | median spread of runs | largest spread |",
        "|---" * 6 + "|",
    ]
    for kind, times in kinds.items():
        off = [abs(predicted(found, time) / time["seconds"] - 1) for time in times]
        spread = [time["spread"] - 1 for time in times]
        shares = [statistics.median(off), max(off), statistics.median(spread), max(spread)]
        near = f"{sum(error <= NEAR for error in off)} of {len(off)}"
        lines.append(f"| {kind} | {near} | {' | '.join(f'{share * 100:.0f} %' for share in shares)} |")
    return "\n".join(lines)


def _choices(found: Mapping[str, Any]) -> str:
    lost = [
        min(row, key=lambda time: predicted(found, time))["seconds"] / min(time["seconds"] for time in row)
        for row in rows(found)
        if len(different(row)) > 1
    ]
    fastest = sum(factor == 1 for factor in lost)
    return (
        f"The algorithm predicted to be the cheapest is the fastest of the three in {fastest} of {len(lost)} cases. "
        f"The chosen one takes {statistics.median(lost):.2f} times as long as the fastest in the median, and "
        f"{max(lost):.2f} times at worst."
    )


def step_table(found: Mapping[str, Any]) -> str:
    """Steps of each layout, measured and predicted."""
    lines = ["| hosts | ranks of each | measured, ms | predicted, ms | error |", "|---|---|---|---|---|"]
    for step in found["steps"]:
        says, measured = predicted_step(found, step), step["seconds"]
        cells = f"{measured * 1e3:.0f} | {says * 1e3:.0f} | {(says / measured - 1) * 100:+.0f} %"
        lines.append(f"| {len(step['each'])} | {step['each'][0]} | {cells} |")
    return "\n".join(lines)


def price_table(found: Mapping[str, Any]) -> str:
    """The prices of the machine and of the limited line."""
    prices = found["prices"][LIMIT]
    times = ("latency_s", "message_s", "wake_s", "wait_s")
    lines = ["| parameter | here |", "|---|---|"]
    lines += [f"| `{name}` | {prices[name] * 1e6:.1f} us |" for name in times]
    lines.append(f"| `bandwidth` | {prices['bandwidth'] / 1e6:.0f} MB/s, limited |")
    lines.append(f"| `burst` | {size(int(prices['burst']))} |")
    lines += [f"| `{name}` | {prices[name] * 1e9:.3f} ns |" for name in ("copy_s", "reduce_s", "node_s")]
    return "\n".join(lines)


def clusters(found: Mapping[str, Any]) -> dict[str, cost.Network]:
    """The networks that are predicted for."""
    here = cost.Network(**found["prices"][FREE])
    return {name: replace(here, processors=RANKS, **facts) for name, facts in CLUSTERS.items()}


def far_table(found: Mapping[str, Any]) -> str:
    """Step times from 8 to 4,096 hosts of 8 ranks."""
    networks, messages = clusters(found), buckets()
    head = " | ".join(f"{name}: reduction, step, efficiency" for name in networks)
    lines = [f"| hosts | {head} |", "|---" * (1 + len(networks)) + "|"]
    for hosts in FAR:
        cells = []
        for network in networks.values():
            reduction = cost.reductions(network, hosts, RANKS, messages)
            step = cost.step(network, hosts, RANKS, messages, compute_s=COMPUTE_S)
            hidden = cost.step(network, hosts, RANKS, messages, compute_s=COMPUTE_S, overlap=0.5)
            used = f"{COMPUTE_S / step * 100:.0f} %, {COMPUTE_S / hidden * 100:.0f} % with overlap"
            cells.append(f"{reduction * 1e3:.0f} ms, {step * 1e3:.0f} ms, {used}")
        lines.append(f"| {hosts:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def choice_table() -> str:
    """From how many bytes on each algorithm is used, by the number of hosts."""
    names = (
        cost.SHORT,
        *sorted(cost.IN_USE, key=("recursive_doubling", "recursive_halving", "two_shot").index),
    )
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
    """The page with `text` between the comments called `name`. Pure.

    Example:
      >>> fill("a <!-- x -->old<!-- end x --> b", "x", "new")
      'a <!-- x -->\\nnew\\n<!-- end x --> b'
    """
    before, begin, following = page.partition(f"<!-- {name} -->")
    _, end, after = following.partition(f"<!-- end {name} -->")
    if not begin or not end:
        raise ValueError(f"the page has no comments called {name}")
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
        found = measure(realtime=flags.realtime, show=lambda time: print(time, flush=True))
        flags.json.write_text(json.dumps(found, indent=1) + "\n")
        print("\n\n".join(made(found) for made in (price_table, table, step_table)))
        return 0
    found = json.loads(flags.json.read_text())
    draw(found, FIGURE)
    parts = {
        "prices": price_table(found),
        "measured": table(found),
        "steps": step_table(found),
        "chosen": choice_table(),
        "predicted": far_table(found),
    }
    page = PAGE.read_text()
    for name, text in parts.items():
        page = fill(page, name, text)
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

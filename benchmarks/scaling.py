#!/usr/bin/env python3
"""Reductions over hosts: measured in namespaces of this machine, and predicted for real ones.

    sudo python benchmarks/scaling.py measure     # benchmarks/results/hosts.json; needs root, some two minutes
    python benchmarks/scaling.py report           # docs/scaling.md (its table) and docs/assets/scaling.svg

`measure` takes the prices of `cost_model.Network` from two hosts with a rank each, and times allreduce on more.
`--realtime` lets the ranks go before the machine's other work.
"""

from __future__ import annotations

import argparse
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

RESULTS = ROOT / "benchmarks/results/hosts.json"
PAGE, FIGURE = ROOT / "docs/scaling.md", ROOT / "docs/assets/scaling.svg"
RATES = ("100mbit", "1gbit")
HOSTS = (2, 3, 4, 6, 8)
SIZES = (MIB, 4 * MIB, 8 * MIB)
MOST_S = 0.5  # of one measurement; at least three rounds

# What clusters are made of. The processor's prices are those of the machine that `measure` ran on.
CLUSTERS = {
    "10 Gbit/s": {"latency_s": 15e-6, "bandwidth": 1.19e9},
    "100 Gbit/s": {"latency_s": 10e-6, "bandwidth": 11.9e9},
}
RANKS = 8
GRADIENTS, COMPUTE_S = 100 * MIB, 0.25
FAR = tuple(8 * 2**i for i in range(10))  # 8 to 4,096 hosts

PRICES = """
import statistics
if REALTIME:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))
world = ss.initialize("native", timeout=60)
me, other = world.rank, 1 - world.rank

def median(act, seconds=1.0):
    times, end = [], time.perf_counter() + 5
    act()
    while True:
        world.barrier()
        begin = time.perf_counter()
        act()
        times.append(time.perf_counter() - begin)
        enough = len(times) >= 3 and (sum(times) > seconds or time.perf_counter() > end)
        if world.allreduce(np.array([float(enough)]), "max")[0]:
            return statistics.median(times)

word, long = np.zeros(1), np.zeros(1 << 21)
got, got_long = np.zeros(1), np.zeros(1 << 21)

def ping_pong():
    for _ in range(100):
        if me == 0:
            world.send(word, 1)
            world.recv(got, 1)
        else:
            world.recv(got, 0)
            world.send(word, 0)

def burst():
    if me == 0:
        for work in [world.isend(word, 1) for _ in range(1000)]:
            work.wait()
    else:
        for _ in range(1000):
            world.recv(got, 0)

def both_ways():
    world.sendrecv(long, other, got_long, other)

a, b = np.ones(1 << 15, "f4"), np.ones(1 << 15, "f4")

def add():
    for _ in range(100):
        np.add(a, b, out=a)

tell(one_way=median(ping_pong) / 200, message=median(burst) / 1000, both_ways=median(both_ways) / long.nbytes,
     reduce=median(add) / 100 / (2 * a.nbytes))
ss.finalize()
"""
TIMES = """
import statistics
if REALTIME:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))
world = ss.initialize("native", timeout=60)
for nbytes in SIZES:
    array, times = np.zeros(nbytes // 4, "f4"), []
    world.allreduce(array)
    while True:
        world.barrier()
        begin = time.perf_counter()
        world.allreduce(array)
        times.append(time.perf_counter() - begin)
        enough = len(times) >= 3 and sum(times) > MOST_S
        if world.allreduce(np.array([float(enough)]), "max")[0]:
            break
    tell(nbytes=nbytes, seconds=statistics.median(times))
ss.finalize()
"""


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

            def job(script: str, n: int) -> list[list[dict[str, Any]]]:
                made = labs.Job(lab, Path(folder), f"REALTIME = {realtime}\n{script}", [1] * n)
                try:
                    texts = [process.stdout.read() for process in made.processes.values()]
                    return [[json.loads(line) for line in text.splitlines()] for text in texts]
                finally:
                    made.end()

            free = job(PRICES, 2)[0][0]
            for rate in RATES:
                for host in range(max(HOSTS)):
                    lab.limit(host, rate)
                limited = job(PRICES, 2)[0][0]
                network = network_of(free, limited, found["processors"])
                found["prices"][rate] = asdict(network)
                for n in HOSTS:
                    sizes = f"SIZES, MOST_S = {SIZES}, {MOST_S}\n"
                    for line in job(sizes + TIMES, n)[0]:
                        found["times"].append({"rate": rate, "hosts": n, **line})
                        print(describe(found, found["times"][-1]), flush=True)
    finally:
        lab.close()
    return found


def network_of(free: Mapping[str, float], limited: Mapping[str, float], processors: int) -> cost.Network:
    """The prices, from what two hosts measured at full speed and at a limited rate. Pure."""
    return cost.Network(
        latency_s=max(0.0, limited["one_way"] - 2 * free["message"]),
        message_s=free["message"],
        bandwidth=1 / limited["both_ways"],
        copy_s=free["both_ways"] / 2,
        reduce_s=free["reduce"],
        processors=processors,
    )


def predicted(found: Mapping[str, Any], time: Mapping[str, Any]) -> float:
    """Seconds that the formulas say for a measured time. The hosts of a lab share its machine's processors."""
    network = cost.Network(**found["prices"][time["rate"]])
    shared = replace(network, processors=network.processors / time["hosts"])
    return cost.flat(shared, time["hosts"], 1, time["nbytes"])


def describe(found: Mapping[str, Any], time: Mapping[str, Any]) -> str:
    """A measured time beside the predicted one, as a row of the page."""
    says = predicted(found, time)
    size = f"{time['nbytes'] // MIB} MiB" if time["nbytes"] >= MIB else f"{time['nbytes'] // KIB} KiB"
    cells = [time["rate"], str(time["hosts"]), size, f"{time['seconds'] * 1e3:.3g}", f"{says * 1e3:.3g}"]
    return "| " + " | ".join([*cells, f"{(says / time['seconds'] - 1) * 100:+.0f} %"]) + " |"


def table(found: Mapping[str, Any]) -> str:
    """All measured times beside the predicted ones, and how far off these are."""
    off = [abs(predicted(found, time) / time["seconds"] - 1) for time in found["times"]]
    rows = "\n".join(describe(found, time) for time in found["times"])
    within = sum(error <= 0.25 for error in off)
    return (
        "| card | hosts | buffer | measured, ms | predicted, ms | |\n|---|---|---|---|---|---|\n"
        f"{rows}\n\n{within} of {len(off)} predictions are within 25 %, half of them within "
        f"{statistics.median(off) * 100:.0f} %; the worst is off by {max(off) * 100:.0f} %."
    )


def clusters(found: Mapping[str, Any]) -> dict[str, cost.Network]:
    """The networks that are predicted for."""
    here = cost.Network(**found["prices"][RATES[-1]])
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


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Cost of each algorithm between hosts by size, for few and many hosts; the lowest line is the best choice."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "samestep"
    from matplotlib import pyplot as plt

    colours = dict(zip(cost.ALGORITHMS, ("#0072B2", "#009E73", "#D55E00", "#CC79A7"), strict=True))
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
                style = "-" if algorithm in cost.IN_USE else "--"
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
    page = fill(PAGE.read_text(), "measured", table(found))
    PAGE.write_text(fill(page, "predicted", far_table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What communication adds to a step of DistributedDataParallel: samestep, gloo, and none, in the same processes.

    python benchmarks/ddp_step.py -n 2                                   # one table
    python benchmarks/ddp_step.py --results benchmarks/results/ddp  # at 2 and 4 ranks, and table.md; 3 minutes
    python benchmarks/ddp_step.py --page benchmarks/results/ddp/*.json > benchmarks/results/ddp/table.md

A step is forward, backward and SGD. All models are equal and live in the same processes; the backends take turns,
rotated from round to round, and so does a model whose hook returns each bucket as it is: what a step takes longer than
that one is the exposed communication. Before each turn all ranks pass a barrier. A turn lasts from the first rank's
start to the last one's end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODELS = {1: (4, 512), 10: (10, 1024), 25: (6, 2048)}  # millions of parameters: layers, width
NONE = "none"
WARM_UP = 3
SLOWEST_S = 120.0  # what a run may take beside its measurements; gloo has been seen to wait for ever
RANKS = (2, 4)

_kept: list[Any] = []
"""Models and groups of gloo: where one is freed, Python's lock is held while threads end that may be waiting for it."""


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Step times of this job, by size and contender, in milliseconds; the same on all ranks."""
    import samestep.torch
    import torch
    import torch.distributed as dist

    samestep.torch.register()  # where it is not installed
    torch.set_num_threads(1)
    dist.init_process_group("samestep")
    groups = {"samestep": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    if dist.is_mpi_available():
        groups["mpi"] = dist.new_group(backend="mpi")
    sizes = {}
    for millions in arguments.sizes:
        turns = {name: _stepper(group, *MODELS[millions], arguments) for name, group in groups.items()}
        turns[NONE] = _stepper(dist.group.WORLD, *MODELS[millions], arguments, silent=True)
        _kept.append((groups, turns))
        sizes[str(millions)] = _rounds(turns, arguments)
    dist.destroy_process_group()
    return sizes


def _stepper(
    group: Any, n_layers: int, width: int, arguments: argparse.Namespace, *, silent: bool = False
) -> Any:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(n_layers)]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers), process_group=group, gradient_as_bucket_view=arguments.views
    )
    if silent:
        model.register_comm_hook(None, debugging_hooks.noop_hook)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    x = torch.randn(arguments.batch, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _rounds(turns: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Let all contenders alternate until the time is over."""
    import torch
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in turns}
    order = list(turns)
    for name in order:
        for _ in range(WARM_UP):
            turns[name]()
    end = time.monotonic() + arguments.seconds / len(arguments.sizes)
    n_rounds = 0
    while True:
        for name in order:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(arguments.steps):
                turns[name]()
            span = torch.tensor([-begin, time.perf_counter()], dtype=torch.float64)  # one clock for the host
            dist.all_reduce(span, dist.ReduceOp.MAX)
            times[name].append(span.sum().item() / arguments.steps * 1e3)
        order = order[1:] + order[:1]
        n_rounds += 1
        over = torch.tensor([float(time.monotonic() > end and n_rounds >= arguments.rounds)])
        dist.broadcast(over, 0)
        if over.item():
            break
    medians = {name: statistics.median(found) for name, found in times.items()}
    # Within a round the machine was the same for all: differences are taken there.
    exposed = {
        name: statistics.median(a - b for a, b in zip(times[name], times[NONE], strict=True))
        for name in turns
        if name != NONE
    }
    return {"step_ms": medians, "exposed_ms": exposed, "rounds": n_rounds, "rounds_ms": times}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The order statistics between which the median lies with 95 % confidence; the extremes of fewer than 6.

    Source: distribution-free, from the binomial distribution of how many values lie below the median
    (H. A. David, H. N. Nagaraja, Order Statistics, 2003, section 7.1).

    Example:
      >>> median_interval(range(1, 13))
      (3, 10)
    """
    n = len(values)
    beyond, tail = 0, 0.5**n  # probability that at most `beyond` values lie below the median
    while tail <= 0.025:
        beyond += 1
        tail += math.comb(n, beyond) * 0.5**n
    ordered = sorted(values)
    outside = max(0, beyond - 1)
    return ordered[outside], ordered[n - 1 - outside]


def exposed(cell: dict[str, Any], name: str) -> tuple[float, float, float]:
    """Median of how much longer a step lasted than one alone in the same round, and its interval, in milliseconds."""
    rounds = cell["rounds_ms"]
    longer = [a - b for a, b in zip(rounds[name], rounds[NONE], strict=True)]
    return statistics.median(longer), *median_interval(longer)


def _with_interval(exposed: tuple[float, float, float]) -> str:
    median, low, high = exposed
    return f"{median:.1f} ({low:.1f} to {high:.1f})" if low > 0 else f"noise ({low:.1f} to {high:.1f})"


def _share(ours: tuple[float, float, float], gloo: tuple[float, float, float]) -> str:
    if gloo[1] <= 0:
        return "-"
    return f"{ours[0] / gloo[0]:.0%}" if ours[1] > 0 else f"below {max(ours[2], 0.0) / gloo[0]:.0%}"


def page(paths: list[Path]) -> str:
    """The tables of stored results."""
    lines = [
        "| ranks | parameters | step alone, ms | samestep, ms | gloo, ms "
        "| exposed: samestep, ms | exposed: gloo, ms | share |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for path in paths:
        found = json.loads(path.read_text())
        for millions, cell in found["sizes"].items():
            steps = [f"{cell['step_ms'][name]:.1f}" for name in (NONE, "samestep", "gloo")]
            ours, gloo = (exposed(cell, name) for name in ("samestep", "gloo"))
            cells = [*steps, _with_interval(ours), _with_interval(gloo), _share(ours, gloo)]
            lines.append(f"| {found['ranks']} | {millions} M | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(arguments: argparse.Namespace, n_ranks: int, words: list[str]) -> int:
    """The measurement as a job of its own."""
    limit = str(SLOWEST_S + 2 * arguments.seconds)
    command = [sys.executable, "-m", "samestep", "run", "--raw", "--timeout", limit, "-n", str(n_ranks)]
    return subprocess.run([*command, __file__, *words], check=False).returncode


def run_all(arguments: argparse.Namespace) -> int:
    """All numbers of ranks, and the tables."""
    paths = [arguments.results / f"{n}.json" for n in RANKS]
    settings = ["--seconds", str(arguments.seconds), "--sizes", ",".join(map(str, arguments.sizes))]
    for n, path in zip(RANKS, paths, strict=True):
        code = run(arguments, n, ["-n", str(n), *settings, "--json", str(path)])
        if code:
            return code
    (arguments.results / "table.md").write_text(page(paths) + "\n")
    return 0


def store(arguments: argparse.Namespace, sizes: dict[str, Any]) -> None:
    import machine

    words = " ".join(["python", "benchmarks/ddp_step.py", *sys.argv[1:]])
    result = {
        "command": words,
        "ranks": int(os.environ["WORLD_SIZE"]),
        "machine": machine.facts(mpi=False),
        "sizes": sizes,
    }
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    for millions, cell in sizes.items():
        shown = {name: round(ms, 2) for name, ms in cell["step_ms"].items()}
        exposed = {name: round(ms, 2) for name, ms in cell["exposed_ms"].items()}
        print(f"{millions} M: step {shown} ms, exposed {exposed} ms, {cell['rounds']} rounds")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument(
        "--sizes", type=lambda text: [int(word) for word in text.split(",")], default=[1, 10, 25]
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for all sizes together")
    parser.add_argument("--rounds", type=int, default=3, help="at least so many of each size")
    parser.add_argument("--steps", type=int, default=2, help="in one turn")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--views", action="store_true", help="gradient_as_bucket_view")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--results", type=Path, help="measure all numbers of ranks into this folder, and end")
    parser.add_argument(
        "--page", type=Path, nargs="+", metavar="RESULT", help="print tables of these and end"
    )
    arguments = parser.parse_args()
    if arguments.page:
        print(page(arguments.page))
        return 0
    if arguments.results:
        return run_all(arguments)
    if "RANK" not in os.environ:
        return run(arguments, arguments.n, sys.argv[1:])
    sizes = measure(arguments)
    if os.environ["RANK"] == "0":
        store(arguments, sizes)
    sys.stdout.flush()
    os._exit(0)  # see _kept


if __name__ == "__main__":
    sys.exit(main())

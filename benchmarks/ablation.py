#!/usr/bin/env python3
"""What each mechanism of csrc/ is worth: switched off alone, in turns with everything on, within one run.

The switches exist only in a build for this program, which must not be used for anything else:

$ pip install --no-build-isolation -C cmake.define.SAMESTEP_ABLATION=ON .
$ samestep run -n 2 benchmarks/ablation.py --json benchmarks/results/ablation/2.json
$ samestep run -n 4 benchmarks/ablation.py --json benchmarks/results/ablation/4.json
$ samestep run -n 4 benchmarks/ablation.py --busy 2 --turn 0.05 --seconds 6 --only oversubscribed_sleep --json ...
$ python benchmarks/ablation.py --table benchmarks/results/ablation/*.json > benchmarks/results/ablation/table.md

A cell is a collective, a size and where its arrays lie. In each round a mechanism runs for about a
millisecond off and one on, in alternating order; the slowest rank counts. Each rank stays on one CPU. Other programs
only ever make a turn longer. So two figures are given, and a mechanism is worth something where both say so: the ratio
of the shortest turns, and the median over those pairs of turns where neither exceeded twice the shortest.
`nothing` is a switch that does nothing: what it shows is the noise. `--busy` starts processes that compute all the
time, like those that load data; turns must be much longer then than the scheduler's time slices.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import numpy as np
import samestep as ss

KIB, MIB = 1 << 10, 1 << 20
SHORT = (8, 64, 512, KIB, 4 * KIB)
MIDDLE = (16 * KIB, 64 * KIB, 256 * KIB, MIB)
LONG = (4 * MIB, 16 * MIB, 64 * MIB)
MOVING = ("bcast", "allgather", "alltoall")
MIN_PAIRS = 5
ALL_VERBS = ("allreduce", *MOVING, "reduce_scatter", "sendrecv", "pingpong")


@dataclass(frozen=True)
class Mechanism:
    """A switch, and the cells in which its code runs at all.

    Attributes:
      name: of `Mechanism` in csrc/core/mechanism.h.
      bit: its number there, which is its bit.
      verbs: the collectives that come to it.
      sizes: bytes.
      memory: of the arrays: `ordinary`, `shared`.
      ranks: 0: any number.
    """

    name: str
    bit: int
    verbs: Sequence[str]
    sizes: Sequence[int]
    memory: Sequence[str] = ("ordinary",)
    ranks: int = 0


EVERY_SHORT = ("allreduce", "bcast", "allgather", "sendrecv")
MECHANISMS = (
    Mechanism("cache_line_demotion", 0, EVERY_SHORT, SHORT),
    Mechanism("late_first_poll", 1, EVERY_SHORT[:3], SHORT),
    Mechanism("cpu_numbers", 2, EVERY_SHORT[:3], SHORT, ranks=4),
    Mechanism("oversubscribed_sleep", 3, ("allreduce",), (64, MIB), ranks=4),
    Mechanism("line_ownership", 4, EVERY_SHORT, (*SHORT, *MIDDLE)),
    Mechanism("single_copy_path", 5, ("allreduce", *MOVING), (*MIDDLE[1:], *LONG[:2])),
    Mechanism("copy_in_copy_out_path", 6, ("allreduce", *MOVING), (*MIDDLE[1:], *LONG[:2])),
    Mechanism("split_path", 7, ("bcast",), (*MIDDLE[1:], *LONG)),
    Mechanism("nontemporal_path", 8, ("bcast", "allgather"), (*MIDDLE[1:], *LONG), ranks=4),
    Mechanism("last_arrival_timing", 9, ("allreduce", *MOVING), (*MIDDLE[1:], *LONG[:2])),
    Mechanism("prestaging", 10, ("allreduce",), (32 * KIB, *MIDDLE[1:])),
    Mechanism("two_rank_swap", 11, ("allgather", "alltoall"), (*MIDDLE[1:], *LONG), ranks=2),
    Mechanism("dynamic_chunks", 13, ("allreduce", "reduce_scatter"), (MIB, *LONG), ("ordinary", "shared")),
    Mechanism("tiny_sums", 15, ("allreduce",), (8, 20, 64)),
    Mechanism("release_prefetch", 16, EVERY_SHORT[:3], (*SHORT, 16 * KIB)),
    Mechanism("expected_path", 17, ("allreduce", *MOVING), (*MIDDLE[1:], *LONG[:2])),
    Mechanism("fast_path", 18, (*EVERY_SHORT, "alltoall", "pingpong"), (*SHORT, *MIDDLE[:3])),
    Mechanism("inline_progress", 19, ("allreduce", *MOVING), (KIB, 4 * KIB, *MIDDLE[:3])),
    Mechanism("nothing", 63, ALL_VERBS, (8, KIB, 64 * KIB, MIB, 16 * MIB)),
)


@dataclass(frozen=True)
class Worth:
    """How much longer a cell takes without a mechanism: 1.05 is 5 %.

    Attributes:
      mechanism: what was off.
      verb: the collective.
      nbytes: of the array that each rank passes.
      memory: where the arrays lie.
      ranks: how many.
      of_shortest: shortest turn without over shortest turn with it.
      of_pairs: median over the undisturbed pairs of turns; None if there were fewer than five.
      microseconds: of a call with everything on, in the shortest turn.
      pairs: how many were undisturbed.
    """

    mechanism: str
    verb: str
    nbytes: int
    memory: str
    ranks: int
    of_shortest: float
    of_pairs: float | None
    microseconds: float
    pairs: int


def call_of(backend: ss.Backend, verb: str, nbytes: int, memory: str) -> Callable[[], object]:
    """The call that is timed, with arrays of its own."""
    n, rank = backend.size, backend.rank
    count = max(nbytes // 4 // n, 1) * n if verb in ("alltoall", "reduce_scatter") else nbytes // 4

    def new(elements: int) -> Any:
        array = backend.empty(elements, np.float32) if memory == "shared" else np.empty(elements, np.float32)
        array[...] = 0
        return array

    x, out = new(count), new({"allgather": count * n, "reduce_scatter": count // n}.get(verb, count))
    if verb == "reduce_scatter":
        x = x.reshape(n, -1)

    def pingpong() -> None:
        if rank % 2 == 0:
            backend.send(x, rank + 1)
            backend.recv(out, rank + 1)
        else:
            backend.recv(out, rank - 1)
            backend.send(x, rank - 1)

    calls: dict[str, Callable[[], object]] = {
        "allreduce": lambda: backend.allreduce(x),
        "bcast": lambda: backend.bcast(x, root=0),
        "allgather": lambda: backend.allgather(x, out=out),
        "alltoall": lambda: backend.alltoall(x, out=out),
        "reduce_scatter": lambda: backend.reduce_scatter(x, out=out),
        "sendrecv": lambda: backend.sendrecv(x, (rank + 1) % n, out, (rank - 1) % n),
        "pingpong": pingpong,
    }
    return calls[verb]


def turn(backend: ss.Backend, call: Callable[[], object], calls: int) -> float:
    """Seconds for each of so many calls on this rank."""
    backend.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def measure(
    backend: ss.Backend, switch: Any, cell: tuple[str, int, str], mechanisms: Sequence[Mechanism], args: Any
) -> list[Worth]:
    """All mechanisms of a cell, in turns."""
    call = call_of(backend, *cell)
    base = switch.value = sum(1 << m.bit for m in MECHANISMS if m.name in args.without)
    for _ in range(60 if cell[1] < 4 * MIB else 15):  # paths are tried out
        call()
    once = np.array([turn(backend, call, 3)])
    backend.allreduce(once, "max")
    calls = int(min(max(args.turn / max(once[0], 1e-9), 1), 3000))
    per_pair = 2 * calls * float(once[0])
    rounds = int(min(max(args.seconds / per_pair, 7), args.rounds))
    times = np.zeros((rounds, len(mechanisms), 2))
    for i in range(rounds):
        for k, mechanism in enumerate(mechanisms):
            for off in (0, 1) if (i + k) % 2 == 0 else (1, 0):
                switch.value = base | off << mechanism.bit
                call()  # with what the last one has left behind
                times[i, k, off] = turn(backend, call, calls)
    backend.allreduce(times, "max")
    return [
        worth_of(mechanism.name, cell, backend.size, times[:, k]) for k, mechanism in enumerate(mechanisms)
    ]


def worth_of(name: str, cell: tuple[str, int, str], ranks: int, times: Any) -> Worth:
    """From the seconds of each pair of turns: on, off."""
    on, off = times.min(axis=0)
    calm = times[(times[:, 0] < 2 * on) & (times[:, 1] < 2 * off)]
    pairs = float(np.median(calm[:, 1] / calm[:, 0])) if len(calm) >= MIN_PAIRS else None
    return Worth(name, *cell, ranks, float(off / on), pairs, float(on * 1e6), len(calm))


@contextmanager
def busy_processes(n: int) -> Iterator[None]:
    """Keeps so many processes computing."""
    # They end by themselves where nobody is left to end them.
    program = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n  for _ in range(10**6): pass"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(n):
            processes.append(subprocess.Popen([sys.executable, "-c", program]))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def cells_of(mechanisms: Iterable[Mechanism], ranks: int) -> dict[tuple[str, int, str], list[Mechanism]]:
    """Which mechanisms are measured in which cell."""
    cells: dict[tuple[str, int, str], list[Mechanism]] = {}
    for mechanism in mechanisms:
        if mechanism.ranks not in (0, ranks):
            continue
        for verb in mechanism.verbs:
            for nbytes in mechanism.sizes:
                for memory in mechanism.memory:
                    cells.setdefault((verb, nbytes, memory), []).append(mechanism)
    return cells


def size_text(nbytes: int) -> str:
    """As the pages write it."""
    if nbytes >= MIB:
        return f"{nbytes // MIB} MiB"
    return f"{nbytes // KIB} KiB" if nbytes >= KIB else f"{nbytes} B"


def table(results: Iterable[dict[str, Any]]) -> str:
    """Markdown: a line for each mechanism, number of ranks and collective. Cells that were disturbed are left out."""
    lines = [
        "| mechanism | ranks | collective | how much longer it takes without: shortest turns / median of pairs |"
    ]
    lines.append("| --- | ---: | --- | --- |")
    rows: dict[tuple[str, int, str, str], list[dict[str, Any]]] = {}
    for result in results:
        for worth in result["worths"]:
            if result["without"]:
                worth["mechanism"] += f" (without {', '.join(result['without'])})"
            if result.get("busy"):
                worth["mechanism"] += f" (beside {result['busy']} busy processes)"
            key = (worth["mechanism"], worth["ranks"], worth["verb"], worth["memory"])
            rows.setdefault(key, []).append(worth)
    for key in sorted(rows):
        name, ranks, verb, memory = key
        found = []
        for worth in sorted(rows[key], key=lambda w: int(w["nbytes"])):
            if worth["pairs"] < MIN_PAIRS:
                continue
            text = (
                f"{size_text(worth['nbytes'])} {worth['of_shortest'] - 1:+.0%} / {worth['of_pairs'] - 1:+.0%}"
            )
            both = min(worth["of_shortest"], worth["of_pairs"]) >= 1.05
            found.append(f"**{text}**" if both else text)
        if not found:
            continue
        where = "" if memory == "ordinary" else " (`backend.empty`)"
        lines.append(f"| `{name}` | {ranks} | {verb}{where} | {', '.join(found)} |")
    return "\n".join(lines)


def keep(args: Any, facts: dict[str, Any], worths: list[Worth], latest: list[Worth]) -> None:
    """Prints what is new, and stores all."""
    for worth in latest:
        print(*asdict(worth).values(), flush=True)
    if args.json:
        result = {
            "machine": facts,
            "without": args.without,
            "busy": args.busy,
            "command": sys.argv,
            "worths": [asdict(w) for w in worths],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Measures, or prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table", nargs="+", type=Path, metavar="JSON", help="print what these hold, and end"
    )
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--only", type=lambda text: text.split(","), help="mechanisms, by comma")
    parser.add_argument(
        "--verbs", type=lambda text: text.split(","), default=ALL_VERBS, help="collectives, by comma"
    )
    parser.add_argument(
        "--without",
        type=lambda text: text.split(","),
        default=[],
        help="mechanisms that are off all the time, by comma",
    )
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--turn", type=float, default=1e-3, help="seconds of one turn")
    parser.add_argument("--seconds", type=float, default=0.6, help="for each mechanism in each cell")
    parser.add_argument("--rounds", type=int, default=200, help="at most")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(path.read_text()) for path in args.table))
        return
    try:
        switch = ctypes.c_uint64.in_dll(ctypes.CDLL(ss._core.__file__), "samestep_ablated")
    except ValueError:
        sys.exit("this samestep has no switches: pip install -C cmake.define.SAMESTEP_ABLATION=ON .")
    wanted = [m for m in MECHANISMS if not args.only or m.name in args.only]
    with ss.initialize() as backend, busy_processes(args.busy if backend.rank == 0 else 0):
        facts = machine.facts(mpi=False) if backend.rank == 0 else {}
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[backend.rank % len(cpus)]})
        worths: list[Worth] = []
        for cell, mechanisms in cells_of(wanted, backend.size).items():
            if cell[0] not in args.verbs:
                continue
            found = measure(backend, switch, cell, mechanisms, args)
            worths += found
            if backend.rank == 0:
                keep(args, facts, worths, found)


if __name__ == "__main__":
    main()

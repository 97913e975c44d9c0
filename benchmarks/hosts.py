"""Ranks of two hosts: samestep beside gloo and Open MPI, over a line of a given rate.

    python benchmarks/hosts.py                                     # as root; 10 minutes
    python benchmarks/hosts.py --rates 10gbit --layouts 2x2 --rounds 1

The hosts are network namespaces of this machine, so they share its processors. Contenders take turns, one job each,
in every round. A call begins with arrays just rewritten, and takes as long as it takes the slowest rank; reported is
the median of the rounds' medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent
PORT = 29600  # nobody else is in these networks
BUDGET_S = 1.5  # of one contender, size and round
PINGS = 400


@dataclass(frozen=True)
class Contender:
    """A library, and how its ranks are started.

    Attributes:
      library: what the worker imports, see `_WORKERS`.
      by_mpirun: started by mpirun, else one by one.
      environment: what is set for it.
    """

    library: str
    by_mpirun: bool
    environment: Mapping[str, str] = field(default_factory=dict)


# Ranks of both hosts share the machine's cores, which Open MPI cannot know: without giving way its ranks take seconds.
_GIVES_WAY = {"OMPI_MCA_mpi_yield_when_idle": "1"}
CONTENDERS = {
    "samestep": Contender("native", by_mpirun=False),
    "samestep over MPI": Contender("mpi", by_mpirun=True, environment=_GIVES_WAY),
    "one level": Contender("native", by_mpirun=False, environment={"SAMESTEP_NATIVE_ENGINE": "tcp"}),
    "gloo": Contender("gloo", by_mpirun=False),
    "Open MPI": Contender("mpi4py", by_mpirun=True, environment=_GIVES_WAY),
    "Open MPI ^han": Contender("mpi4py", by_mpirun=True, environment={**_GIVES_WAY, "OMPI_MCA_coll": "^han"}),
}


# ---- one rank


@dataclass(frozen=True)
class Group:
    """What the measurement needs of a library; `arrays` makes an array of so many float32, by name of the kind."""

    rank: int
    size: int
    arrays: Mapping[str, Callable[[int], Any]]
    allreduce: Callable[[Any], object]
    barrier: Callable[[], object]
    slowest: Callable[[float], float]
    send: Callable[[Any, int], object]
    recv: Callable[[Any, int], object]
    close: Callable[[], object]


def _ordinary(count: int) -> Any:
    return np.empty(count, np.float32)


def _samestep(backend: str) -> Group:
    import samestep as ss

    world = ss.initialize(backend, timeout=120)
    return Group(
        world.rank,
        world.size,
        {"": _ordinary, " shared": lambda count: world.empty(count, np.float32)},
        world.allreduce,
        world.barrier,
        lambda seconds: float(world.allreduce(np.array([seconds]), "max")[0]),
        world.send,
        world.recv,
        ss.finalize,
    )


def _mpi4py() -> Group:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return Group(
        world.rank,
        world.size,
        {"": _ordinary},
        lambda x: world.Allreduce(MPI.IN_PLACE, x),
        world.Barrier,
        lambda seconds: float(world.allreduce(seconds, MPI.MAX)),
        world.Send,
        world.Recv,
        lambda: None,
    )


def _gloo() -> Group:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))

    def slowest(seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value.item()

    return Group(
        dist.get_rank(),
        dist.get_world_size(),
        {"": _ordinary},
        lambda x: dist.all_reduce(torch.from_numpy(x)),
        dist.barrier,
        slowest,
        lambda x, peer: dist.send(torch.from_numpy(x), peer),
        lambda x, peer: dist.recv(torch.from_numpy(x), peer),
        dist.destroy_process_group,
    )


_WORKERS: dict[str, Callable[[], Group]] = {
    "native": lambda: _samestep("native"),
    "mpi": lambda: _samestep("mpi"),
    "mpi4py": _mpi4py,
    "gloo": _gloo,
}


def _bytes_sent() -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            return int(line.split(":")[1].split()[8])
    return 0


def _half_round_trip(group: Group) -> float:
    """Seconds of 8 bytes one way between the first and the last rank."""
    word, peer, times = np.zeros(1), group.size - 1 - group.rank, []
    for _ in range(PINGS):
        begin = time.perf_counter()
        for act in (group.send, group.recv) if group.rank == 0 else (group.recv, group.send):
            act(word, peer)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / 2


def _allreduce(group: Group, x: Any) -> tuple[float, float]:
    """Seconds of an allreduce, and what the host sent meanwhile, as a multiple of the array."""

    def once() -> float:
        x[...] = group.rank + 1
        group.barrier()
        begin = time.perf_counter()
        group.allreduce(x)
        return group.slowest(time.perf_counter() - begin)

    once()
    calls = int(min(40, max(3, BUDGET_S / once())))
    before = _bytes_sent()
    times = [once() for _ in range(calls)]
    sent = (_bytes_sent() - before) / calls / x.nbytes
    if not (x == group.size * (group.size + 1) / 2).all():
        raise RuntimeError("the sum is wrong")
    return statistics.median(times), sent


def work(library: str, sizes: Sequence[int]) -> None:
    """What each rank runs; rank 0 prints a line of JSON."""
    group = _WORKERS[library]()
    found: dict[str, Any] = {}
    if group.rank in {0, group.size - 1}:
        found["half_round_trip_us"] = _half_round_trip(group) * 1e6
    group.barrier()
    for kind, make in group.arrays.items():
        for nbytes in sizes:
            seconds, sent = _allreduce(group, make(nbytes // 4))
            found[f"{nbytes}{kind}"] = {"ms": seconds * 1e3, "sent": sent}
    if group.rank == 0:
        print(json.dumps(found), flush=True)
    group.close()


# ---- all ranks


def _lab(n_hosts: int) -> Any:
    sys.path.insert(0, str(ROOT / "tests" / "hosts"))
    import lab

    if reason := lab.missing():
        sys.exit(f"hosts.py: {reason}")
    return lab.Lab(n_hosts)


def limit(lab: Any, n_hosts: int, rate: str) -> None:
    """Both ends of each cable send no faster than this."""
    for i in range(n_hosts):
        for host, card in (("switch", f"card{i}"), (f"node{i}", "eth0")):
            lab.run(host, f"tc qdisc replace dev {card} root tbf rate {rate} burst 256kb limit 4mb")


def start(lab: Any, name: str, layout: tuple[int, int], sizes: Sequence[int], port: int) -> dict[str, Any]:
    """Runs one contender's job and returns what rank 0 found."""
    contender, (hosts, each) = CONTENDERS[name], layout
    worker = [sys.executable, __file__, "--worker", contender.library, "--sizes", ",".join(map(str, sizes))]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "PRTE"))}
    clean |= contender.environment
    if contender.by_mpirun:
        jobs = [_mpirun(lab, hosts, each, worker, clean)]
    else:
        jobs = []
        for rank in range(hosts * each):
            names = {"RANK": rank, "WORLD_SIZE": hosts * each, "LOCAL_RANK": rank % each}
            place = {"MASTER_ADDR": "10.78.0.1", "MASTER_PORT": port}
            env = clean | {key: str(value) for key, value in (names | place).items()}
            env |= {"LOCAL_WORLD_SIZE": str(each), "GLOO_SOCKET_IFNAME": "eth0"}
            jobs.append(_process([*lab._inside(f"node{rank // each}"), *worker], env))
    outputs = [job.communicate(timeout=300) for job in jobs]
    for job, (out, err) in zip(jobs, outputs, strict=True):
        if job.returncode:
            raise RuntimeError(f"{name}: {out[-2000:]}{err[-2000:]}")
    lines = [line for out, _ in outputs for line in out.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _process(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _mpirun(
    lab: Any, hosts: int, each: int, worker: Sequence[str], env: dict[str, str]
) -> subprocess.Popen[str]:
    agent = Path(tempfile.gettempdir()) / "samestep-hosts-rsh"  # what mpirun takes for ssh
    cases = "".join(f"node{i}) pid={lab._pid(f'node{i}')};; " for i in range(hosts))
    agent.write_text(
        f'#!/bin/sh\ncase "$1" in {cases}esac\nshift\nexec nsenter --target=$pid --net --uts -- sh -c "$*"\n'
    )
    agent.chmod(0o755)
    mpirun = shutil.which("mpirun") or sys.exit("hosts.py: there is no mpirun")
    env |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_plm_ssh_agent": str(agent),
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
    }
    where = ",".join(f"node{i}:{each}" for i in range(hosts))
    passed = [
        word for key in env if key.startswith(("OMPI_MCA", "SAMESTEP", "PYTHONPATH")) for word in ("-x", key)
    ]
    flags = ["--bind-to", "none", "--oversubscribe", "--host", where, "-n", str(hosts * each), *passed]
    return _process([*lab._inside("node0"), mpirun, *flags, *worker], env)


def floor_ms(nbytes: int, rate: str) -> float:
    """Of an allreduce over two hosts: each sends one array, in packets of 1448 bytes that take 1514."""
    return nbytes * 8 * 1514 / 1448 / (float(rate.removesuffix("gbit")) * 1e9) * 1e3


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median, least and most of what the rounds found."""
    joined: dict[str, Any] = {}
    for key, first in rounds[0].items():
        if isinstance(first, dict):
            ms = [found[key]["ms"] for found in rounds]
            joined[key] = {
                "ms": statistics.median(ms),
                "rounds_ms": ms,
                "sent": statistics.median(r[key]["sent"] for r in rounds),
            }
        else:
            joined[key] = statistics.median(found[key] for found in rounds)
    return joined


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rates and layouts."""
    cells, port = [], PORT
    for layout in args.layouts:
        hosts, each = map(int, layout.split("x"))
        lab = _lab(hosts)
        try:
            for rate in args.rates:
                limit(lab, hosts, rate)
                found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.contenders}
                for turn in range(args.rounds):
                    order = args.contenders if turn % 2 == 0 else args.contenders[::-1]
                    for name in order:
                        port += 1
                        found[name].append(start(lab, name, (hosts, each), args.sizes, port))
                        print(f"{rate} {layout} round {turn + 1}: {name}", file=sys.stderr, flush=True)
                cells.append(
                    {"rate": rate, "layout": layout, "found": {n: summary(r) for n, r in found.items()}}
                )
                print(table(cells[-1], args.sizes), flush=True)
        finally:
            lab.close()
    return {"command": " ".join(["python", *sys.argv]), "cores": os.cpu_count(), "cells": cells}


def table(cell: Mapping[str, Any], sizes: Sequence[int]) -> str:
    """The cell as lines of Markdown."""
    heads = "".join(f" {nbytes // MIB} MiB, ms |" for nbytes in sizes)
    lines = [
        f"| {cell['rate']}, {cell['layout']} |{heads} sent | 8 bytes, us |",
        "|---" * (len(sizes) + 3) + "|",
    ]
    floors = "".join(f" {floor_ms(nbytes, cell['rate']):.1f} |" for nbytes in sizes)
    lines.append(f"| floor of the line |{floors} 1.00 | |")
    for name, found in cell["found"].items():
        kinds = list(dict.fromkeys(key.partition(" ")[2] for key in found if key[0].isdigit()))
        for kind in kinds:
            own = [found[f"{nbytes} {kind}".strip()] for nbytes in sizes]
            times = "".join(f" {each['ms']:.1f} |" for each in own)
            label = f"{name}, {kind} arrays" if kind else name
            latency = "" if kind else f"{found['half_round_trip_us']:.1f}"
            lines.append(f"| {label} |{times} {own[-1]['sent']:.2f} | {latency} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    split = {"type": lambda text: text.split(",")}
    parser.add_argument("--rates", default=["1gbit", "10gbit"], **split)
    parser.add_argument("--layouts", default=["2x1", "2x2"], help="hosts x ranks of each", **split)
    parser.add_argument("--contenders", default=list(CONTENDERS), **split)
    parser.add_argument(
        "--sizes",
        type=lambda t: [int(n) for n in t.split(",")],
        default=[MIB, 16 * MIB, 64 * MIB],
        help="bytes",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=list(_WORKERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.sizes)
        return
    found = measure(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Ranks of two hosts: samestep beside gloo, Open MPI and MPICH, over a line of a given rate.

    python benchmarks/hosts.py                    # as root; six minutes; writes benchmarks/results/hosts/*.json
    python benchmarks/hosts.py --rates 10gbit --layouts 2x2 --rounds 2
    python benchmarks/hosts.py --contenders samestep,encrypted --layouts 2x1
    python benchmarks/hosts.py --render           # benchmarks/results/hosts/two-hosts.md from these

The hosts are network namespaces of this machine, so they share its processors. The ranks of all contenders are started
first; then they take turns, in every round, while the others sleep. A call begins with arrays just rewritten, and takes
as long as it takes the slowest rank; the first of each turn is not counted. Reported is the median of the rounds'
medians. Leave the machine alone meanwhile, and the priority as it is: ranks that spin at real-time priority keep the
kernel from moving their own packets. A contender that does not answer in time is left out of what follows, and the
table says so.

MPICH is measured with the interpreter that `--mpich-python`, or MPICH_PYTHON, names: one whose mpi4py loads it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hosts_rank

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/hosts"
PAGE = RESULTS / "two-hosts.md"
PORT = 29600  # nobody else is in these networks
START_S, TURN_S = 60.0, 60.0  # after which a contender is given up


AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Namespaces need root, as whom Open MPI runs nothing unless these are set."""


@dataclass(frozen=True)
class Contender:
    """A library, and how its ranks are started.

    Attributes:
      library: what the worker imports, see `hosts_rank.LIBRARIES`.
      by_mpirun: started by mpirun, else one by one.
      environment: what is set for it.
      mpich: it runs under MPICH's interpreter.
    """

    library: str
    by_mpirun: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    mpich: bool = False


# Ranks of both hosts share the machine's cores, which Open MPI cannot know: unless its ranks yield, they take seconds.
_GIVES_WAY = {"OMPI_MCA_mpi_yield_when_idle": "1"}
# Between processes of one machine UCX would not use the network, whatever namespaces they are in.
_ONLY_TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0", "FI_TCP_IFACE": "eth0", "FI_PROVIDER": "tcp"}
CONTENDERS = {
    "samestep": Contender("native", by_mpirun=False),
    "samestep over MPI": Contender("mpi", by_mpirun=True, environment=_GIVES_WAY),
    "one level": Contender("native", by_mpirun=False, environment={"SAMESTEP_NATIVE_TRANSPORT": "tcp"}),
    "encrypted": Contender("native", by_mpirun=False, environment={"SAMESTEP_ENCRYPT": "1"}),
    "gloo": Contender("gloo", by_mpirun=False),
    "Open MPI": Contender("mpi4py", by_mpirun=True, environment=_GIVES_WAY),
    "Open MPI without han": Contender(
        "mpi4py", by_mpirun=True, environment={**_GIVES_WAY, "OMPI_MCA_coll": "^han"}
    ),
    "MPICH": Contender("mpi4py", by_mpirun=True, environment=_ONLY_TCP, mpich=True),
}
DEFAULT = [name for name in CONTENDERS if name not in ("one level", "encrypted")]


def _lab(n_hosts: int) -> Any:
    sys.path.insert(0, str(ROOT / "tests" / "hosts"))
    import lab

    if reason := lab.missing():
        sys.exit(f"hosts.py: {reason}")
    return lab.Lab(n_hosts)


class LabJob:
    """One contender's ranks, which sleep between their turns."""

    def __init__(
        self, lab: Any, name: str, layout: tuple[int, int], args: argparse.Namespace, port: int
    ) -> None:
        self.name = name
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        hosts, each = layout
        for pipe in ["answers", *(f"orders{rank}" for rank in range(hosts * each))]:
            os.mkfifo(self._folder / pipe)
        # Read and write, so that open() waits for nobody and no end is seen before this program closes it.
        self._answers = os.open(self._folder / "answers", os.O_RDWR)
        self._orders = [os.open(self._folder / f"orders{rank}", os.O_RDWR) for rank in range(hosts * each)]
        self._log = (self._folder / "log").open("w+")
        self._rest = b""
        contender = CONTENDERS[name]
        python = args.mpich_python if contender.mpich else sys.executable
        worker = [python, str(Path(__file__).resolve()), "--worker", contender.library]
        worker += [
            "--sizes",
            ",".join(map(str, args.sizes)),
            "--folder",
            str(self._folder),
            "--each",
            str(each),
        ]
        options = {"stdout": self._log, "stdin": subprocess.DEVNULL}
        environment = {**AS_ROOT, **contender.environment}
        if contender.by_mpirun:
            argv = _mpirun(contender, hosts, each, environment, python)
            self._processes = [lab.start("node0", [*argv, *worker], env=environment, **options)]
        else:
            self._processes = []
            for rank in range(hosts * each):
                place = {
                    "RANK": rank,
                    "WORLD_SIZE": hosts * each,
                    "LOCAL_RANK": rank % each,
                    "MASTER_PORT": port,
                }
                env = environment | {key: str(value) for key, value in place.items()}
                env |= {
                    "MASTER_ADDR": "10.78.0.1",
                    "SAMESTEP_SECRET": "of this benchmark",
                    "LOCAL_WORLD_SIZE": str(each),
                    "GLOO_SOCKET_IFNAME": "eth0",
                }
                self._processes.append(lab.start(f"node{rank // each}", worker, env=env, **options))
        self._answer(START_S)

    def turn(self) -> dict[str, Any]:
        """What rank 0 finds in one turn. Raises RuntimeError with what the ranks printed if it does not come."""
        for order in self._orders:
            os.write(order, b"go\n")
        return self._answer(TURN_S)

    def _answer(self, most_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + most_s
        while b"\n" not in self._rest:
            if select.select([self._answers], [], [], 0.2)[0]:
                self._rest += os.read(self._answers, 1 << 16)
            elif time.monotonic() > deadline or any(process.poll() for process in self._processes):
                self._log.seek(0)
                raise RuntimeError(f"{self.name} gave no answer: {self._log.read()[-2000:]}")
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """Lets the ranks end; those that do not are killed."""
        for pipe in [*self._orders, self._answers]:
            os.close(pipe)
        deadline = time.monotonic() + 10
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            process.kill()
            process.wait()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _mpirun(
    contender: Contender, hosts: int, each: int, environment: dict[str, str], python: str
) -> list[str]:
    """The launcher's command; adds to `environment` what it needs."""
    beside = str(Path(python).parent)  # not resolved: an environment's python is a link
    mpirun = shutil.which("mpirun", path=f"{beside}:{os.environ['PATH']}") or sys.exit(
        "hosts.py: there is no mpirun"
    )
    where = ",".join(f"node{i}:{each}" for i in range(hosts))
    if contender.mpich:
        return [mpirun, "-hosts", where, "-n", str(hosts * each)]
    environment |= {"PRTE_MCA_plm_ssh_no_tree_spawn": "1", "OMPI_MCA_btl_tcp_if_include": "eth0"}
    passed = [
        key for key in [*environment, *os.environ] if key.startswith(("OMPI_MCA", "SAMESTEP", "PYTHONPATH"))
    ]
    words = [word for key in dict.fromkeys(passed) for word in ("-x", key)]
    return [mpirun, "--bind-to", "none", "--oversubscribe", "--host", where, "-n", str(hosts * each), *words]


def floor_ms(nbytes: int, rate: str) -> float:
    """Of an allreduce over two hosts: each sends one array, in packets of 1448 bytes that take 1514."""
    return nbytes * 8 * 1514 / 1448 / (float(rate.removesuffix("gbit")) * 1e9) * 1e3


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median of what the rounds found, and all of it."""
    joined: dict[str, Any] = {"library": rounds[0]["library"]}
    for key, first in rounds[0].items():
        if isinstance(first, dict):
            ms = [found[key]["ms"] for found in rounds]
            sent = statistics.median(found[key]["sent"] for found in rounds)
            joined[key] = {"ms": statistics.median(ms), "rounds_ms": ms, "sent": sent}
        elif key != "library":
            each = [found[key] for found in rounds]
            joined[key], joined[f"rounds_{key}"] = statistics.median(each), each
    return joined


def measure(args: argparse.Namespace) -> None:
    """All rates and layouts; each makes a file."""
    port = PORT
    for layout in args.layouts:
        hosts, each = map(int, layout.split("x"))
        lab = _lab(hosts)
        jobs: list[LabJob] = []
        absent: dict[str, str] = {}

        def mark_failed(name: str, error: RuntimeError, absent: dict[str, str] = absent) -> None:
            absent[name] = str(error)
            print(f"{name} is left out: {error}", file=sys.stderr, flush=True)

        try:
            for name in args.contenders:
                port += 1
                try:
                    jobs.append(LabJob(lab, name, (hosts, each), args, port))
                except RuntimeError as error:
                    mark_failed(name, error)
            for rate in args.rates:
                for host in range(hosts):
                    lab.limit(host, rate)
                rounds: dict[str, list[dict[str, Any]]] = {job.name: [] for job in jobs}
                for turn in range(args.rounds):
                    for job in list(jobs if turn % 2 == 0 else jobs[::-1]):
                        try:
                            rounds[job.name].append(job.turn())
                        except RuntimeError as error:
                            mark_failed(job.name, error)
                            jobs.remove(job)
                            job.end()
                write(args, rate, layout, {name: summary(r) for name, r in rounds.items() if r}, absent)
        finally:
            for job in jobs:
                job.end()
            lab.close()


def write(
    args: argparse.Namespace, rate: str, layout: str, found: Mapping[str, Any], absent: Mapping[str, str]
) -> None:
    """One file of results, and its table."""
    cell = {
        "rate": rate,
        "layout": layout,
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.release()}",
        "rounds": args.rounds,
        "sizes": args.sizes,
        "found": dict(found),
        "absent": sorted(absent),
    }
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / f"{rate}-{layout}.json").write_text(json.dumps(cell, indent=1) + "\n")
    print(table(cell), flush=True)


def table(cell: Mapping[str, Any]) -> str:
    """The cell as lines of Markdown."""
    sizes = cell["sizes"]
    heads = "".join(f" {nbytes // MIB} MiB, ms |" for nbytes in sizes)
    lines = [
        f"| {cell['rate']}, {cell['layout']} |{heads} of the floor | sent | 8 bytes, us |",
        "|---" * (len(sizes) + 4) + "|",
    ]
    floors = [floor_ms(nbytes, cell["rate"]) for nbytes in sizes]
    lines.append(f"| floor of the line |{''.join(f' {floor:.1f} |' for floor in floors)} 1.00 | 1.00 | |")
    for name, found in cell["found"].items():
        kinds = dict.fromkeys(key.partition(" ")[2] for key in found if key[0].isdigit())
        for kind in kinds:
            own = [found[f"{nbytes} {kind}".strip()] for nbytes in sizes]
            times = "".join(f" {each['ms']:.1f} |" for each in own)
            label = f"{name}, {kind} arrays" if kind else name
            latency = "" if kind else f"{found['half_round_trip_us']:.1f}"
            of_floor = own[-1]["ms"] / floors[-1]
            lines.append(f"| {label} |{times} {of_floor:.2f} | {own[-1]['sent']:.2f} | {latency} |")
    lines += [f"| {name} | gave no answer |" for name in cell["absent"] if name not in cell["found"]]
    return "\n".join(lines) + "\n"


def render(results: Path) -> str:
    """The page of all cells in `results`."""
    cells = [json.loads(file.read_text()) for file in sorted(results.glob("*.json"))]
    libraries = {found["library"] for cell in cells for found in cell["found"].values()}
    machines = sorted({f"{cell['machine']}, {cell['date']}, {cell['rounds']} rounds" for cell in cells})
    return "\n".join(
        [
            "Made by `python benchmarks/hosts.py --render` from the JSON beside it, which that program writes.",
            f"{'; '.join(machines)}. {', '.join(sorted(libraries))}.",
            '"Of the floor": time of the longest array over that of the line; "sent": by a host, in arrays.',
            "",
            *map(table, cells),
        ]
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    split = {"type": lambda text: text.split(",")}
    parser.add_argument("--rates", default=["1gbit", "10gbit"], **split)
    parser.add_argument("--layouts", default=["2x1", "2x2"], help="hosts x ranks of each", **split)
    parser.add_argument("--contenders", default=DEFAULT, help=", ".join(CONTENDERS), **split)
    parser.add_argument(
        "--sizes",
        type=lambda t: [int(n) for n in t.split(",")],
        default=[MIB, 64 * MIB],
        help="bytes",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument(
        "--mpich-python", default=os.environ.get("MPICH_PYTHON", ""), help="of MPICH's environment"
    )
    parser.add_argument("--render", action="store_true", help="write the page, and measure nothing")
    parser.add_argument("--worker", choices=list(hosts_rank.LIBRARIES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--each", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        hosts_rank.work(args.worker, args.sizes, args.folder, args.each)
        return
    if args.render:
        (args.results / PAGE.name).write_text(render(args.results))
        return
    if unknown := [name for name in args.contenders if name not in CONTENDERS]:
        parser.error(f"no contender is called {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    if not args.mpich_python:
        args.contenders = [name for name in args.contenders if not CONTENDERS[name].mpich]
        print("hosts.py: no --mpich-python, so MPICH is left out", file=sys.stderr)
    measure(args)


if __name__ == "__main__":
    main()

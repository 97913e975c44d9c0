"""Run programs of other projects on two ranks, over gloo and over samestep, and compare the results.

    python benchmarks/third_party.py               # some ten minutes; writes benchmarks/results/third_party.json
    python benchmarks/third_party.py --only accelerate deepspeed
    python benchmarks/third_party.py --only torchft --update  # replaces the rows of this library in that file
    python benchmarks/third_party.py --render      # docs/third-party.md, from that file

Both backends run the same command, which torchrun starts, or which starts its ranks itself: `SAMESTEP_REPLACE_GLOO=1`
gives a program that asks for gloo samestep instead. What is not installed is left out and named. A program that has not
ended after `--limit` seconds counts as hanging. The exit code is 1 if a program passes over gloo only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).parent
PROGRAMS = HERE / "third_party"
RESULTS = HERE / "results" / "third_party.json"
PAGE = HERE.parent / "docs" / "third-party.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
BACKENDS = ("gloo", "samestep")
N_RANKS = 2
EXTENSIONS = (
    tempfile.TemporaryDirectory()
)  # what DeepSpeed compiles at its first start, which counts to its first row


@dataclass(frozen=True)
class Program:
    """One row.

    Attributes:
      library: the distribution that it belongs to, or is a client of.
      what: for the page.
      argv: what follows torchrun's own flags, or Python's.
      written_here: the program is ours and calls the library as its users do; else it is in the library's wheel.
      alone: the program starts its ranks itself.
    """

    library: str
    what: str
    argv: tuple[str, ...]
    written_here: bool = False
    alone: bool = False


def _accelerate(name: str, what: str) -> Program:
    return Program("accelerate", what, ("-m", f"accelerate.test_utils.scripts.{name}"))


def _ours(library: str, what: str, file: str, *words: str, alone: bool = False) -> Program:
    return Program(library, what, (str(PROGRAMS / file), *words), written_here=True, alone=alone)


def _torchft(module: str, what: str) -> Program:
    return Program("torchft", what, (str(PROGRAMS / "torchft_tests.py"), module), alone=True)


ROWS = (
    _accelerate("test_ops", "`test_ops`: gather, reduce, broadcast, pad of nested tensors"),
    _accelerate("test_sync", "`test_sync`: `no_sync` and gradient accumulation"),
    _accelerate("test_script", "`test_script`: loaders, random states, training against one process"),
    _accelerate("test_distributed_data_loop", "`test_distributed_data_loop`: uneven inputs"),
    _ours("pytorch-lightning", "its BoringModel by two DDP strategies", "lightning_boring.py"),
    _ours("deepspeed", "ZeRO, stage 1", "deepspeed_zero.py", "1"),
    _ours("deepspeed", "ZeRO, stage 2", "deepspeed_zero.py", "2"),
    _ours("deepspeed", "ZeRO, stage 3", "deepspeed_zero.py", "3"),
    _ours(
        "torch", "parameters of FSDP2 saved and loaded by its distributed checkpoints", "torch_checkpoint.py"
    ),
    _ours("torch", "60 groups in the way of Megatron", "torch_groups.py"),
    _ours(
        "torch",
        "a scheduler's loop: 48 bytes gathered in each of 300 steps, and requests",
        "torch_scheduler.py",
    ),
    _ours("torchmetrics", "ten metrics whose states differ in length on the ranks", "torchmetrics_ragged.py"),
    _ours(
        "torchft",
        "three replicas; one is killed within a step, restarted, and heals from another",
        "torchft_restart.py",
        alone=True,
    ),
    _torchft("process_group_test", "`process_group_test`: groups of one rank and of three"),
    _torchft("manager_integ_test", "`manager_integ_test`: replicas that fail, are restarted and heal"),
    _torchft("local_sgd_integ_test", "`local_sgd_integ_test`: LocalSGD and DiLoCo, with failures"),
)


def run(program: Program, backend: str, limit_s: float) -> dict[str, Any]:
    """One job: how it ended, after how long, and the line that says why, or what a program of ours notes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={N_RANKS}"]
    launcher = [] if program.alone else torchrun
    variables = {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    variables["TORCH_EXTENSIONS_DIR"] = EXTENSIONS.name
    if backend == "samestep":
        variables["SAMESTEP_REPLACE_GLOO"] = "1"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        began = time.monotonic()
        job = subprocess.Popen(
            [sys.executable, "-W", "ignore", *launcher, *program.argv],
            env={**os.environ, **variables},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            job.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)  # torchrun ends its ranks
            try:
                job.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
            return {"how": "hangs", "seconds": limit_s, "text": ""}
        seconds = time.monotonic() - began
        log.seek(0)
        text = log.read().decode(errors="replace")
    if job.returncode == 0:
        note = [line.removeprefix("note: ") for line in text.splitlines() if line.startswith("note: ")]
        return {"how": "passed", "seconds": seconds, "text": "".join(note)}
    return {"how": "failed", "seconds": seconds, "text": why(text)}


def why(log: str) -> str:
    """The line of a log that names the first exception. Pure.

    Example:
      >>> why("[rank1]: Traceback (most recent call last):\\n[rank1]:   File ...\\n[rank1]: ValueError: no data\\n")
      'ValueError: no data'
    """
    for line in log.splitlines():
        words = line.partition("]: ")[2] if line.startswith("[rank") else line
        name = words.partition(":")[0]
        if name.replace(".", "").isidentifier() and name.endswith(("Error", "Exception")):
            return words.strip()
    return (log.strip().splitlines() or [""])[-1]


def shown(cell: dict[str, Any] | None) -> str:
    """A cell of the table. Pure."""
    if cell is None:
        return "-"
    if cell["how"] == "hangs":
        return f"**hangs**: nothing after {cell['seconds']:.0f} s"
    if cell["how"] == "failed":
        text = cell["text"].replace("|", "\\|")
        return f"fails after {cell['seconds']:.0f} s: `{text[:160]}`"
    note = f": {cell['text']}" if cell["text"] else ""
    return f"passes, {cell['seconds']:.0f} s{note}"


def page(found: dict[str, Any]) -> str:
    """The results as Markdown. Pure."""
    lines = ["| library | program | gloo | samestep |", "|---|---|---|---|"]
    for row in found["rows"]:
        whose = " (our program)" if row["written_here"] else ""
        cells = " | ".join(shown(row.get(backend)) for backend in BACKENDS)
        lines.append(f"| {row['library']} {row['version']} | {row['what']}{whose} | {cells} |")
    n_passed = {b: sum(row.get(b, {}).get("how") == "passed" for row in found["rows"]) for b in BACKENDS}
    total = len(found["rows"])
    counts = ", ".join(f"{n} of {total} pass over {backend}" for backend, n in n_passed.items())
    missing = f" Not installed: {', '.join(found['missing'])}." if found["missing"] else ""
    later = {
        row["library"]: row["date"]
        for row in found["rows"]
        if row.get("date", found["date"]) != found["date"]
    }
    dates = ", ".join([found["date"], *(f"{library} {date}" for library, date in later.items())])
    return "\n".join(
        [*lines, "", f"{counts}.{missing}", "", f"{found['machine']}, {dates}: `{found['command']}`"]
    )


def updated(found: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """Earlier results with the rows of the libraries that have been measured again, which get a date. Pure.

    Example:
      >>> old = {"date": "1", "rows": [{"library": "a"}, {"library": "b"}]}
      >>> updated(old, {"date": "2", "rows": [{"library": "b", "gloo": {}}]})["rows"]
      [{'library': 'a'}, {'library': 'b', 'gloo': {}, 'date': '2'}]
    """
    measured = {row["library"] for row in again["rows"]}
    rows = [row for row in found["rows"] if row["library"] not in measured]
    return {**found, "rows": rows + [{**row, "date": again["date"]} for row in again["rows"]]}


def measure(wanted: list[str], limit_s: float) -> dict[str, Any]:
    """Runs every program that can be run, over both backends."""
    rows, missing = [], []
    for program in ROWS:
        if wanted and program.library not in wanted:
            continue
        try:
            version = importlib.metadata.version(program.library)
        except importlib.metadata.PackageNotFoundError:
            missing.append(program.library)
            continue
        row: dict[str, Any] = {
            "library": program.library,
            "version": version,
            "what": program.what,
            "written_here": program.written_here,
        }
        for backend in BACKENDS:
            row[backend] = run(program, backend, limit_s)
            print(
                f"{program.library:<20}{Path(program.argv[-1]).name:<70} {backend:<10}{shown(row[backend])}",
                flush=True,
            )
        rows.append(row)
    return {
        "rows": rows,
        "missing": sorted(set(missing)),
        "torch": importlib.metadata.version("torch"),
        "machine": machine.describe(machine.facts(mpi=False), N_RANKS),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/third_party.py",
    }


def render() -> None:
    """Writes the results between the comments of the page."""
    text = PAGE.read_text()
    before, following = text.split(BEGIN)
    after = following.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{page(json.loads(RESULTS.read_text()))}\n\n{END}{after}")


def main() -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="LIBRARY", help="these libraries; writes nothing"
    )
    parser.add_argument(
        "--update", action="store_true", help="with --only: replace their rows in the results"
    )
    parser.add_argument(
        "--limit", type=float, default=120.0, metavar="S", help="seconds until a program hangs"
    )
    parser.add_argument("--render", action="store_true", help="write the page from the last results")
    flags = parser.parse_args()
    if flags.render:
        render()
        return 0
    found = measure(flags.only, flags.limit)
    if flags.update:
        found = updated(json.loads(RESULTS.read_text()), found)
    if flags.update or not flags.only:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        render()
    worse = [row for row in found["rows"] if row["gloo"]["how"] == "passed" != row["samestep"]["how"]]
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())

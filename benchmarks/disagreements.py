"""Ten cases in which one of three ranks disagrees or leaves: how soon the others know, and what they read.

    python benchmarks/disagreements.py             # some ten minutes; writes benchmarks/results/disagreements.json
    python benchmarks/disagreements.py --cases shape,killed --systems samestep,gloo
    python benchmarks/disagreements.py --systems mlx --add      # these anew, beside what the file has of the others
    python benchmarks/disagreements.py --render    # docs/disagreements.md and its figure, from that file

Each system is started as its users start it: `samestep run`, `torchrun`, the `mpirun` of the MPI library that mpi4py
loads, and `mlx.launch`. What is not installed is left out. After `--limit` seconds what still waits counts as hanging.
A rank that gets a result although another rank asked for something else counts as silent: it does not know.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
from disagreements_rank import CASES, CULPRIT, SYSTEMS
from samestep.launch import mpirun

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "disagreements.json"
PAGE = HERE.parent / "docs" / "disagreements.md"
FIGURE = "assets/disagreements.svg"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
N_RANKS = 3
ABOUT_CULPRIT = ("rank 1", "ranks 1", "[1]", "Rank 1")


def command(system: str, case: str, folder: str) -> tuple[list[str], dict[str, str]]:
    """What starts the ranks, and the variables that it needs."""
    program = [str(HERE / "disagreements_rank.py"), system, case, folder]
    if system == "samestep":
        return [sys.executable, "-m", "samestep", "run", "-n", str(N_RANKS), *program], {}
    if system == "gloo":
        flags = ["--standalone", f"--nproc-per-node={N_RANKS}"]
        return [sys.executable, "-m", "torch.distributed.run", *flags, *program], {}
    if system == "mlx":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        launcher = [str(Path(sys.executable).with_name("mlx.launch")), "-n", str(N_RANKS)]
        return [*launcher, "--backend", "ring", "-p", str(port), "--", sys.executable, *program], {}
    started = [mpirun.find()[0], "-n", str(N_RANKS), sys.executable, *program]
    return started, {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


def run(system: str, case: str, limit_s: float) -> dict[str, Any]:
    """One job: what became of the innocent ranks."""
    with tempfile.TemporaryDirectory() as folder:
        argv, variables = command(system, case, folder)
        log = Path(folder) / "log"
        with log.open("wb") as output:
            job = subprocess.Popen(
                argv,
                env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        began = _wait_for_start(job, Path(folder))
        ended = _wait_for_end(job, began + limit_s)
        living = [int(path.read_text()) for path in Path(folder).glob("*.began")]
        for pid in [*living, job.pid]:
            _kill(pid)
        job.wait()
        ranks = {
            rank: _outcome(Path(folder) / f"{rank}.json", (ended or 0.0) - began if ended else None, limit_s)
            for rank in range(N_RANKS)
            if rank != CULPRIT
        }
        return {"ranks": ranks, "log": log.read_text(errors="replace")[-2000:]}


def _wait_for_start(job: subprocess.Popen[bytes], folder: Path) -> float:
    deadline = time.monotonic() + 120
    while len(list(folder.glob("*.began"))) < N_RANKS:
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the ranks did not start:\n{(folder / 'log').read_text()}")
        time.sleep(0.01)
    return time.monotonic()


def _wait_for_end(job: subprocess.Popen[bytes], deadline: float) -> float | None:
    try:
        job.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return None
    return time.monotonic()


def _kill(pid: int) -> None:
    try:
        os.killpg(os.getpgid(pid), signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _outcome(report: Path, job_s: float | None, limit_s: float) -> dict[str, Any]:
    if report.exists():
        found: dict[str, Any] = json.loads(report.read_text())
        return {"how": "error" if found["text"] else "silent", **found}
    if job_s is not None:
        return {"how": "ended", "seconds": job_s, "text": ""}
    return {"how": "hangs", "seconds": limit_s, "text": ""}


def worst(cell: dict[str, Any]) -> tuple[str, float]:
    """Of the innocent ranks: hanging is worse than silence, that than being ended, that than an error. Pure.

    Example:
      >>> worst({"ranks": {"0": {"how": "error", "seconds": 0.1}, "2": {"how": "silent", "seconds": 0.0}}})
      ('silent', 0.1)
    """
    order = ["error", "ended", "silent", "hangs"]
    ranks = cell["ranks"].values()
    return max((rank["how"] for rank in ranks), key=order.index), max(rank["seconds"] for rank in ranks)


def shown(cell: dict[str, Any] | None, limit_s: float) -> str:
    """A cell of the table. Pure."""
    if cell is None:
        return "-"
    how, seconds = worst(cell)
    if how == "hangs":
        return f"**hangs** (> {limit_s:.0f} s)"
    if how == "silent":
        return "**silent**: a rank continues with a result"
    after = f"{seconds:.1f} s" if seconds >= 0.1 else "< 0.1 s"
    if how == "ended":
        return f"{after}, ended by the launcher"
    named = all(any(word in rank["text"] for word in ABOUT_CULPRIT) for rank in cell["ranks"].values())
    return f"{after}{', names the rank' if named else ''}"


def table(found: dict[str, Any]) -> str:
    """The page's tables. Pure."""
    systems = list(found["systems"])
    lines = [
        "| what one rank does | " + " | ".join(found["systems"][name] for name in systems) + " |",
        "|---" * (len(systems) + 1) + "|",
    ]
    for case in found["cells"]:
        what = (CASES[case].__doc__ or "").split("; ")[0].removeprefix("One rank ").rstrip(".")
        cells = [shown(found["cells"][case].get(name), found["limit_s"]) for name in systems]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "What rank 0 reads, the first 200 characters:",
        "",
        "| what one rank does | system | text |",
        "|---|---|---|",
    ]
    for case, cells in found["cells"].items():
        for name, cell in cells.items():
            if text := " ".join(cell["ranks"]["0"]["text"].split()).replace("|", "\\|"):
                lines.append(f"| {case} | {name} | {text[:200]}{'…' if len(text) > 200 else ''} |")
    about = found["machine"]
    lines += [
        "",
        f"{about['processor']}, {about['usable_cores']} cores, three ranks, {about['utc'][:10]}: `{found['command']}`",
        *(f"\n{line}" for line in found.get("also", [])),
    ]
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """One panel of bars for each system; hatched: hangs or silent."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update(
        {"svg.hashsalt": "samestep", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    from matplotlib import pyplot as plt

    cases = list(found["cells"])
    figure, panels = plt.subplots(
        1, len(found["systems"]), figsize=(10, 3.2), sharey=True, layout="constrained"
    )
    for panel, (name, title) in zip(panels, found["systems"].items(), strict=True):
        for row, case in enumerate(cases):
            how, seconds = worst(found["cells"][case][name])
            bad = how in ("hangs", "silent")
            width = found["limit_s"] if bad else max(seconds, 0.02)
            panel.barh(
                row, width, color="#D55E00" if bad else "#0072B2", hatch="//" if how == "silent" else None
            )
            if bad:
                panel.text(
                    0.03, row, "never" if how == "hangs" else "silent", va="center", color="white", fontsize=8
                )
        panel.set(xscale="log", xlim=(0.01, found["limit_s"]), title=title, xlabel="seconds until all know")
    panels[0].set_yticks(range(len(cases)), cases)
    panels[0].invert_yaxis()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def render() -> None:
    """Writes page and figure."""
    found = json.loads(RESULTS.read_text())
    old = PAGE.read_text()
    PAGE.write_text(f"{old[: old.index(BEGIN)]}{BEGIN}\n\n{table(found)}\n\n{old[old.index(END) :]}")
    draw(found, PAGE.parent / FIGURE)
    print(f"wrote {PAGE}")


def measure(flags: argparse.Namespace) -> None:
    """Runs all cells and stores them."""
    cells: dict[str, Any] = {}
    total = len(flags.cases) * len(flags.systems)
    for case in flags.cases:
        for system in flags.systems:
            cells.setdefault(case, {})[system] = cell = run(system, case, flags.limit)
            done = sum(map(len, cells.values()))
            print(f"{done}/{total} {case}, {system}: {shown(cell, flags.limit)}", flush=True)
    about = machine.facts()
    mpi = f"mpi4py, {about['mpi']['name']} {about['mpi']['version']}" if about["mpi"] else "mpi4py"
    titles = {
        "samestep": "samestep",
        "gloo": f"gloo, torch {about['versions'].get('torch', '')}",
        "mpi4py": mpi,
        "mlx": f"MLX {_version('mlx')}, ring",
    }
    found = {
        "command": "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "limit_s": flags.limit,
        "machine": about,
        "systems": {name: titles[name] for name in flags.systems},
        "cells": cells,
    }
    if flags.add:
        found = added(json.loads(flags.json.read_text()), found)
    flags.json.write_text(json.dumps(found, indent=1) + "\n")


def added(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`old` with the cells of `new`, and how those were measured. Pure.

    Example:
      >>> facts = {"command": "b", "machine": {"utc": "2026-11-25 01:00"}}
      >>> new = {"systems": {"b": "B"}, "cells": {"x": {"b": 2}}, **facts}
      >>> both = added({"systems": {"a": "A"}, "cells": {"x": {"a": 1}}}, new)
      >>> both["cells"], both["also"]
      ({'x': {'a': 1, 'b': 2}}, ['B: 2026-11-25, `b`'])
    """
    cells = {case: {**of_case, **new["cells"].get(case, {})} for case, of_case in old["cells"].items()}
    names = ", ".join(new["systems"].values())
    note = f"{names}: {new['machine']['utc'][:10]}, `{new['command']}`"
    also = [line for line in old.get("also", []) if not line.startswith(f"{names}: ")]
    return {**old, "systems": {**old["systems"], **new["systems"]}, "cells": cells, "also": [*also, note]}


def _version(name: str) -> str:
    return importlib.metadata.version(name) if importlib.util.find_spec(name) else ""


def _installed() -> list[str]:
    """The systems that can be measured here."""
    modules = {"samestep": "samestep", "gloo": "torch", "mpi4py": "mpi4py", "mlx": "mlx"}
    return [name for name in SYSTEMS if importlib.util.find_spec(modules[name])]


def main() -> None:
    """Measures, or renders."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = {"type": lambda text: text.split(",")}
    parser.add_argument("--cases", default=list(CASES), **names, help=", ".join(CASES))
    parser.add_argument("--systems", default=_installed(), **names, help=", ".join(SYSTEMS))
    parser.add_argument(
        "--limit", type=float, default=20.0, help="seconds after which a rank hangs (%(default)s)"
    )
    parser.add_argument("--add", action="store_true", help="keep what the file has of other systems")
    parser.add_argument("--json", type=Path, default=RESULTS, help="(%(default)s)")
    parser.add_argument(
        "--render", action="store_true", help="write the page and its figure, and measure nothing"
    )
    flags = parser.parse_args()
    for given, known in ((flags.cases, CASES), (flags.systems, SYSTEMS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    if flags.render:
        render()
    else:
        measure(flags)


if __name__ == "__main__":
    main()

"""One rank of four is killed in a step: what the loss costs, here and under other systems.

Each system trains the network of `task.py` once without the loss and some times with it, in turns. Steps lost had been
finished and were made again, or were discarded. Seconds are those from the SIGKILL until the step in which it came is
finished. The parameters at the end are compared with those of the same system without a loss.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "survive.json"
LIMIT_S = 180.0
AT, RANKS, DIES = 30, 4, 1  # as in `task.py`, which needs torch
RUN = [sys.executable, "-m", "samestep", "run", "-n", str(RANKS), "--raw", "--min-ranks", "1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]


def by_launcher(command: list[str], program: str, *words: str) -> Any:
    """Runs a program under a launcher that starts lost ranks again itself, or needs none."""

    def run(folder: str, how: str) -> None:
        argv = [*command, str(HERE / program), folder, how, *words]
        # Else ranks over gloo that torchrun has started again (torch 2.13) find the addresses of those before.
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        subprocess.run(argv, capture_output=True, check=True, timeout=LIMIT_S, env=env)

    return run


def by_replicas(folder: str, how: str) -> None:
    """Runs the lighthouse and the replicas of torchft, and starts the one that dies again."""
    from torchft.coordination import LighthouseServer

    # As the README of torchft starts it.
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100
    )
    end = time.monotonic() + LIMIT_S

    def start(replica: int, life: int) -> subprocess.Popen[bytes]:
        argv = [sys.executable, str(HERE / "torchft_replicas.py"), folder, how, str(replica), str(life)]
        env = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
        return subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    replicas = [start(replica, 0) for replica in range(RANKS)]
    try:
        if how == "dies":
            assert replicas[DIES].wait(LIMIT_S) == -signal.SIGKILL
            replicas[DIES] = start(DIES, 1)
        codes = [process.wait(max(0.0, end - time.monotonic())) for process in replicas]
    finally:
        for process in replicas:
            process.kill()
        lighthouse.shutdown()
    assert not any(codes[:DIES] + codes[DIES + 1 :]), codes


SYSTEMS: dict[str, tuple[str, str, Any]] = {  # title, distribution, how it runs
    "samestep": ("samestep", "samestep", by_launcher(RUN, "samestep_loop.py")),
    "torchelastic-1": (
        "torchrun, a checkpoint in each step",
        "torch",
        by_launcher([*TORCHRUN, "--max-restarts=3"], "torchelastic.py", "1"),
    ),
    "torchelastic-10": (
        "torchrun, a checkpoint in each tenth step",
        "torch",
        by_launcher([*TORCHRUN, "--max-restarts=3"], "torchelastic.py", "10"),
    ),
    "torchft": ("torchft", "torchft", by_replicas),
}


def one(run: Any, how: str) -> dict[str, Any]:
    """What one run has noted."""
    with tempfile.TemporaryDirectory() as folder:
        run(folder, how)
        files = {path.name: path.read_text() for path in Path(folder).iterdir() if path.name != "checkpoint"}
    digests = {text for name, text in files.items() if name.startswith("digest")}
    assert len(digests) == 1, "the ranks differ"
    found: dict[str, Any] = {"digest": digests.pop()}
    if how == "dies":
        killed = float(files["killed"])
        first = [
            [json.loads(line) for line in text.splitlines()] for n, text in files.items() if "rank 0" in n
        ]
        finished = sorted(each for lines in first for each in lines)  # of the lives of rank 0
        found["seconds"] = min(at for at, step, _ in finished if step >= AT and at > killed) - killed
        steps = [step for _, step, is_discarded in finished if not is_discarded]
        found["repeated"] = len(steps) - len(set(steps))
        found["discarded"] = sum(is_discarded for *_, is_discarded in finished)
    return found


def summary(undisturbed: list[dict[str, Any]], struck: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the runs of one system. Pure.

    Example:
      >>> whole, other = {"digest": "a"}, {"digest": "a", "seconds": 0.5, "repeated": 9, "discarded": 0}
      >>> summary([whole], [other, {**other, "seconds": 1.5}])["seconds"], summary([whole], [other])["equal"]
      ([0.5, 1.0, 1.5], True)
    """
    seconds = [each["seconds"] for each in struck]
    return {
        "runs": len(struck),
        "seconds": [min(seconds), statistics.median(seconds), max(seconds)],
        "repeated": statistics.median([each["repeated"] for each in struck]),
        "discarded": statistics.median([each["discarded"] for each in struck]),
        "equal": {each["digest"] for each in struck} == {each["digest"] for each in undisturbed},
    }


def table(found: dict[str, Any]) -> str:
    """In Markdown. Pure."""
    heads = [
        "system",
        "finished steps made again",
        "steps discarded",
        "seconds (least to most)",
        "parameters",
    ]
    rows = [heads, ["---"] * len(heads)]
    for system in found["systems"].values():
        least, median, most = system["seconds"]
        parameters = "equal" if system["equal"] else "others"
        repeated, discarded = f"{system['repeated']:g}", f"{system['discarded']:g}"
        seconds = f"{median:.2f} ({least:.2f} to {most:.2f})"
        rows.append([system["title"], repeated, discarded, seconds, parameters])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(runs: int) -> None:
    """Measures, writes the results after each turn, and prints the table."""
    known = {
        name: system for name, system in SYSTEMS.items() if importlib.util.find_spec(system[1]) is not None
    }
    for name in SYSTEMS.keys() - known.keys():
        print(f"{name} is not installed", file=sys.stderr)
    whole = {name: one(run, "lives") for name, (_, _, run) in known.items()}
    struck: dict[str, list[dict[str, Any]]] = {name: [] for name in known}
    command = f"python benchmarks/survive.py --compare {runs}"
    about = {"command": command, "machine": machine.facts(mpi=False), "load": os.getloadavg()}
    for turn in range(runs):
        for name, (_, _, run) in known.items():
            struck[name].append(one(run, "dies"))
            print(turn + 1, name, struck[name][-1], file=sys.stderr, flush=True)
        systems = {
            name: {"title": title, "version": importlib.metadata.version(distribution)}
            | summary([whole[name]], struck[name])
            for name, (title, distribution, _) in known.items()
        }
        found = {**about, "systems": systems}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))

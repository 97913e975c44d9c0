"""Does something to one rank of a job over MPI at a random moment: what becomes of the others, as a table in Markdown.

    python tests/chaos/mpi_faults.py --runs 160 --seed 1

Each run is a job of its own under the `mpirun` of the MPI library in use, which is asked to let the others go on. Ranks
make random operations whose results are known, until one of them ends or has made some more after a fault that it
survived. The same seed makes the same runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from samestep.launch import mpirun

GO_ON = {"openmpi": ["--continuous"], "hydra": ["-disable-auto-cleanup"]}
TIMEOUT_S = 20.0  # of operations: a rank that needs so long has not noticed the death
LIMIT_S = 150.0  # of a job
FOUND_S, ENDED_S = 5.0, 5.0 + 5.0  # what is promised for a loaded machine: two seconds and five
ENDS = ("SIGKILL", "SIGSEGV", "os._exit(0)", "os._exit(7)", "exception", "sys.exit(0)")
HARMLESS = ("pause", "undumpable")
FAULTS = (*ENDS, "pause", "memory", "nofile", "undumpable")  # descriptors are mostly those of the MPI library
TRANSPORTS = ("shm", "mpi")
PROGRAM = Path(__file__).parent / "programs" / "random_operations.py"


class Outcome(NamedTuple):
    """Of one job. `survivors`: what they reported; `bad`: what must not be, empty if all is well."""

    transport: str
    fault: str
    survivors: list[dict[str, Any]]
    found_s: float
    ended_s: float
    bad: list[str]


def run(seed: int, folder: Path) -> Outcome:
    """One job, all of it chosen by `seed`."""
    choices = random.Random(seed)
    transport, fault = choices.choice(TRANSPORTS), choices.choice(FAULTS)
    n = choices.choice([2, 3, 4])
    victim, at, catches = choices.randrange(n), choices.randrange(60), choices.random() < 0.5
    moment = folder / f"{seed}.time"
    arguments = [seed, victim, at, catches, str(moment), fault, TIMEOUT_S]
    argv = [sys.executable, str(PROGRAM), "run_until", *map(json.dumps, arguments)]
    line, extra = mpirun.command(n, argv)
    line[1:1] = GO_ON[mpirun.find()[1]]
    env = os.environ | extra | {"SAMESTEP_MPI_TRANSPORT": transport}
    with subprocess.Popen(
        line,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            text, _ = job.communicate(timeout=LIMIT_S)
            hung = False
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)  # mpirun ends its ranks
            text, _ = job.communicate()
            hung = True
    end = time.time()
    lines = [json.loads(found) for found in re.findall(r"<(\{.*?\})>", text)]
    survivors = [line for line in lines if line["rank"] != victim]
    if not moment.exists():
        return Outcome(transport, fault, survivors, 0.0, 0.0, [f"it never came to the fault: {text}"])
    died = float(moment.read_text())
    found_s = max((one["at"] - died for one in survivors), default=0.0)
    ended_s = end - max((one["at"] for one in survivors), default=died)
    bad = ["hung"] * hung
    bad += [f"{n - 1 - len(survivors)} survivors ended by the launcher"] * (len(survivors) != n - 1)
    bad += ["wrong numbers"] * any(one["wrong"] for one in lines)
    lost = fault in ENDS or len(lines) == len(survivors) or any(one["kind"] for one in lines)
    if fault in HARMLESS:
        bad += ["an error"] * lost
    elif lost:
        bad += ["at the deadline or not at all"] * any(one["kind"] != "PeerLostError" for one in survivors)
    if fault not in ENDS:
        return Outcome(transport, fault, survivors, 0.0, 0.0, bad)
    bad += ["found late"] * (found_s > FOUND_S) + ["ended late"] * (ended_s > ENDED_S)
    return Outcome(transport, fault, survivors, found_s, ended_s, bad)


def table(outcomes: list[Outcome]) -> str:
    """One line for each transport and fault."""
    lines = [
        "| ranks talk by | one rank ends by | jobs | survivors | operations | wrong | hung "
        "| ended by the launcher | `PeerLostError` | found within | ended within |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for transport in TRANSPORTS:
        for fault in FAULTS:
            of = [each for each in outcomes if (each.transport, each.fault) == (transport, fault)]
            if not of:
                continue
            found = [one for each in of for one in each.survivors]
            bad = Counter(word for each in of for word in each.bad)
            by_launcher = sum(int(w.split()[0]) for each in of for w in each.bad if "launcher" in w)
            lines.append(
                f"| {transport} | {fault} | {len(of)} | {len(found) + by_launcher} "
                f"| {sum(one['done'] for one in found)} | {sum(one['wrong'] for one in found)} "
                f"| {bad['hung']} | {by_launcher} "
                f"| {sum(one['kind'] == 'PeerLostError' for one in found)} "
                f"| {max(each.found_s for each in of):.1f} s | {max(each.ended_s for each in of):.1f} s |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=160)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each of the others adds 1")
    options = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seed, options.seed + options.runs):
            outcomes.append(run(seed, Path(folder)))
            if outcomes[-1].bad:
                print(f"seed {seed}: {outcomes[-1]}", file=sys.stderr, flush=True)
    print(table(outcomes))
    return int(any(each.bad for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())

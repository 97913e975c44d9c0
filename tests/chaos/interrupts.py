"""Asks small trainings to stop at random times, resumes them on another number of ranks, and compares the result.

    python tests/chaos/interrupts.py --interrupts 200 --jobs 2

SIGTERM or SIGUSR1 goes to a rank, to `samestep run`, or to all processes of the job, as systemd and Slurm do: as the
ranks start, before and after each call of a step, between steps and epochs, while the file is written, and at moments
that nobody chose; some twice, some together with a SIGKILL to a rank. Each training is interrupted up to four times.
Ranks have to end after the same step, with the documented code, and with one file, from which the next run goes on.
Prints a table in Markdown, and a line for each run that did something else; its seed repeats it. Exits with 1 then.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from samestep.launch import processes

PROGRAM = Path(__file__).parent.parent / "survive" / "programs" / "interrupted.py"
PATIENCE_S = 60.0
WORLDS = ("shm", "tcp", "hierarchical")
STEPS, PER_EPOCH = 36, 9
SHARDS = (1, 3, 4, 8)
START = ("import", "initialize", "made")  # places in step 0
IN_STEP = ("begin", "added", "mean", "updated", "after")
SAVE = ("write", "rename")  # by rank 0
STOPPED = 128 + signal.SIGTERM
WORDS = ("began", "saved", "ended", "result")
EARLY = (STOPPED, 128 + signal.SIGUSR1, -signal.SIGTERM, -signal.SIGUSR1)
"""Exit codes of what is ended before it listens."""


class Leg(NamedTuple):
    """One run of a training, and its interruption."""

    seed: int
    world: str
    n: int
    elastic: bool
    target: str
    """"rank", "launcher", "all", or "none"."""
    signum: str
    where: str
    """"start", "step", "between", "save", or "time": some seconds after `after`."""
    planned: list[str]
    after: str
    """What is waited for before the launcher, or all, get the signal: "" or "began"."""
    seconds: list[float]
    """When it is sent, counted from there; one number for each time."""
    kill: bool


class Outcome(NamedTuple):
    """What became of a leg: "" if all was right, else what was not."""

    leg: Leg
    wrong: str
    code: int | None
    seconds: float
    steps: int
    """That the file has, if it was written; else 0."""
    struck: int
    """Signals that ask for an end, as far as they came in time."""
    kills: int
    resumed: bool
    """It went on from a file."""
    err: str


def plan(draw: random.Random, seed: int, worlds: list[str], done: int) -> Leg:
    """A random leg, after `done` steps. Pure but for `draw`."""
    n, elastic = draw.randint(1, 5), draw.random() < 0.75
    target = draw.choice(["rank", "rank", "launcher", "all"])
    signum = draw.choice(["SIGTERM", "SIGUSR1"])
    twice, kill = draw.random() < 0.3, elastic and n > 1 and draw.random() < 0.5
    where = draw.choice(["start", "step", "step", "between", "save", "time", "time"])
    planned: list[str] = []
    after, seconds = "began", [draw.uniform(0, 0.6)]
    if where == "start" and target != "rank":
        after = ""
    if target == "rank":
        rank, step = draw.randrange(n), draw.randint(done + 1, STEPS)
        place = f"{step}:{draw.choice(IN_STEP)}"
        if where == "start":
            place = f"0:{draw.choice(START)}"
        elif where == "between":
            place = f"{draw.randint(done // PER_EPOCH + 1, STEPS // PER_EPOCH)}:between"
        planned.append(f"{rank}@{place}:{signum}")
        if twice:
            later = f"{step}:after" if where in ("step", "time") else place
            planned.append(f"{draw.randrange(n)}@{later}:{draw.choice(['SIGTERM', 'SIGUSR1'])}")
    elif twice:
        seconds.append(seconds[0] + draw.choice([0.0, draw.uniform(0, 0.1)]))
    if where == "save":  # by whoever writes the file, in whatever step that is
        ends = "SIGKILL" if kill else draw.choice(["SIGTERM", "SIGUSR1"])
        planned.append(f"0@*:{draw.choice(SAVE)}:{ends}")
    elif kill:
        at = f"{draw.randint(done + 1, STEPS)}:{draw.choice(IN_STEP)}"
        if target == "rank" and where == "step" and draw.random() < 0.5:  # in the step that is to be the last
            at = f"{step}:{draw.choice(IN_STEP)}"
        planned.append(f"{draw.randrange(n)}@{at}:SIGKILL")
    return Leg(seed, draw.choice(worlds), n, elastic, target, signum, where, planned, after, seconds, kill)


def command(leg: Leg, path: str, shards: int) -> list[str]:
    run = [sys.executable, "-m", "samestep", "run", "-n", str(leg.n), "--raw"]
    run += [
        "--max-restarts",
        "2",
        *(["--min-ranks", "1"] if leg.elastic else []),
    ]  # what has stopped is not restarted
    return [*run, str(PROGRAM), *map(json.dumps, (path, leg.planned, shards))]


class Run:
    """A leg that runs: its output, and when it says what."""

    def __init__(self, leg: Leg, path: str, shards: int) -> None:
        transport = "auto" if leg.world == "hierarchical" else leg.world
        env = {**os.environ, "SAMESTEP_NATIVE_TRANSPORT": transport}
        if leg.world == "hierarchical":
            env["SURVIVE_HOSTS"] = "2"
        self.process = subprocess.Popen(
            command(leg, path, shards), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        self.out: list[str] = []
        self.err = ""
        self.n, self.began = leg.n, threading.Event()
        self._readers = [threading.Thread(target=self._read_out), threading.Thread(target=self._read_err)]
        for reader in self._readers:
            reader.start()

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.out.append(line.rstrip("\n"))
                if sum(said.startswith("began") for said in self.out) >= self.n:
                    self.began.set()
        self.began.set()

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            self.err = self.process.stderr.read()

    def interrupt(self, leg: Leg) -> int:
        """Send the signals of a leg that no rank sends itself; how many came in time."""
        if leg.after:
            self.began.wait(PATIENCE_S)
        begin, n_sent = time.monotonic(), 0
        for seconds in leg.seconds:
            time.sleep(max(0.0, begin + seconds - time.monotonic()))
            pids = [self.process.pid]
            if leg.target == "all":
                pids += processes.descendants(self.process.pid)
            if self.process.poll() is None:
                processes.send_signal(pids, signal.Signals[leg.signum])
                n_sent += 1
        return n_sent

    def wait(self) -> int | None:
        """The exit code; None if it hangs."""
        code = None
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            processes.send_signal(
                [self.process.pid, *processes.descendants(self.process.pid)], signal.SIGKILL
            )
            self.process.wait()
        for reader in self._readers:
            reader.join()
        return code


def strike(leg: Leg, path: str, shards: int, expected: str) -> Outcome:
    """Run one leg."""
    begin, before = time.monotonic(), _identity(path)
    run = Run(leg, path, shards)
    struck = run.interrupt(leg) if leg.target in ("launcher", "all") else 0
    code = run.wait()
    has_changed = _identity(path) != before
    wrong = judge(leg, code, run.out, has_changed, expected)
    kills = sum(line.startswith("struck") and line.endswith("SIGKILL") for line in run.out)
    struck += sum(line.startswith("struck") for line in run.out) - kills
    steps = max((int(line.split()[2]) for line in run.out if line.startswith("saved")), default=0)
    told = "\n".join([*run.out, run.err]) if wrong else ""
    return Outcome(leg, wrong, code, time.monotonic() - begin, steps, struck, kills, before is not None, told)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def judge(leg: Leg, code: int | None, out: list[str], has_changed: bool, expected: str) -> str:
    """What is wrong; "" if all is right. Pure."""
    said = {word: [line.split()[1:] for line in out if line.startswith(f"{word} ")] for word in WORDS}
    results = {words[0] for words in said["result"]}
    wrong = ""
    if code is None:
        wrong = "it hangs"
    elif results - {expected}:
        wrong = "another result"
    elif said["ended"]:
        wrong = _wrong_stop(leg, code, said, has_changed)
    elif has_changed:
        wrong = "a file was written, and no rank has stopped"
    elif code == 0:
        wrong = "" if results else "no result, and no failure"
    elif code not in EARLY or (len(said["began"]) >= leg.n and not results):
        wrong = f"code {code}, neither before the ranks listened nor behind their loop"
    return wrong


def _wrong_stop(leg: Leg, code: int, said: dict[str, list[list[str]]], has_changed: bool) -> str:
    """What is wrong where ranks have stopped."""
    steps = {words[1] for words in said["ended"]} | {words[1] for words in said["saved"]}
    if len(steps) > 1 or {words[2] for words in said["ended"]} != {str(STOPPED)}:
        return f"ranks ended after different steps, or with other codes: {said}"
    if not has_changed or (len(said["saved"]) != 1 and not leg.kill):
        return f"the file was written {len(said['saved'])} times"
    return "" if code == STOPPED else f"all have stopped, with code {code}"


class Chain(NamedTuple):
    """What became of one training."""

    seed: int
    outcomes: list[Outcome]


def train(seed: int, worlds: list[str], expected: dict[int, str]) -> Chain:
    """Interrupt one training up to four times, and let it end."""
    draw = random.Random(seed)
    shards, outcomes, done = draw.choice(SHARDS), [], 0
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state.npz")
        for _ in range(draw.randint(1, 4)):
            if done == STEPS:
                break
            outcomes.append(strike(plan(draw, seed, worlds, done), path, shards, expected[shards]))
            done = max(done, outcomes[-1].steps)
            if outcomes[-1].code == 0 or outcomes[-1].wrong:
                return Chain(seed, outcomes)
        last = plan(draw, seed, worlds, 0)._replace(target="none", planned=[], where="end", kill=False)
        outcome = strike(last, path, shards, expected[shards])
        if not outcome.wrong and outcome.code != 0:
            outcome = outcome._replace(wrong=f"undisturbed, it ends with {outcome.code}")
        return Chain(seed, [*outcomes, outcome])


def undisturbed(shards: int) -> str:
    """The result of one rank."""
    argv = [sys.executable, str(PROGRAM), *map(json.dumps, ("", [], shards, None, 0.0))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    found = re.search(r"^result (\w+)", done.stdout, re.MULTILINE)
    assert found is not None
    return found[1]


def table(outcomes: list[Outcome]) -> str:
    """A row for each transport, in Markdown. Pure."""
    heads = ["transport", "interruptions", "stopped with a file", "twice", "and a kill", "resumed", "wrong"]
    rows = [heads, ["---"] * len(heads)]
    for world in [*WORLDS, "all"]:
        of_world = [o for o in outcomes if world in (o.leg.world, "all")]
        struck = [o for o in of_world if o.struck]
        numbers = [
            len(struck),
            sum(o.steps > 0 for o in struck),
            sum(o.struck > 1 for o in struck),
            sum(o.kills > 0 for o in struck),
            sum(o.resumed for o in of_world),
            sum(bool(o.wrong) for o in of_world),
        ]
        rows.append([world, *map(str, numbers)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--interrupts", type=int, default=10, help="trainings are run until there were so many"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first training; the next ones count on")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--world", action="append", choices=WORLDS, help="the transport; default: all")
    given = parser.parse_args(argv)
    expected = {shards: undisturbed(shards) for shards in SHARDS}
    outcomes: list[Outcome] = []
    seed = given.seed
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        while sum(outcome.struck > 0 for outcome in outcomes) < given.interrupts:
            seeds = range(seed, seed + 2 * given.jobs)
            seed += len(seeds)
            for chain in pool.map(lambda one: train(one, given.world or list(WORLDS), expected), seeds):
                outcomes += chain.outcomes
                for outcome in chain.outcomes:
                    if outcome.wrong:
                        print(f"bad: {outcome}", flush=True)
    print(table(outcomes))
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

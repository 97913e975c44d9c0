"""Does something to a random rank at a random moment of a random schedule, and counts what becomes of the others.

    python tests/chaos/chaos.py --faults 2000 --seed 1 --world shm --world tcp --world hierarchical

Prints a table in Markdown, and a line for each fault after which a survivor hung, crashed, was wrong, or had arrays
that another rank wrote after its error; its seed repeats it. Exits with 1 if there was any.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import random
import select
import signal
import statistics
import sys
import tempfile
import time
import traceback
from typing import Any, NamedTuple

import faults
import numpy as np
import samestep as ss

TIMEOUT_S = 3.0  # of every operation
START_S = 120.0  # until the fault
PATIENCE_S = 30.0  # from the fault until all survivors have ended
LAST_S = 0.5  # of the schedule after a fault that may end no rank
ENDS = ("kill", "stop", "wake", "exit", "raise", "return")  # after which each survivor gets an error
HARMLESS = ("pause", "undumpable")  # after which no rank does
KINDS = (*ENDS, "pause", *faults.KINDS)
SIGNALS = ("kill", "stop", "wake", "pause")  # sent by the parent
WORLDS = ("shm", "tcp", "hierarchical")  # all native


class Fault(NamedTuple):
    """One trial. `moment`: seconds after the start for a signal, else the number of the operation before which the
    victim ends itself."""

    seed: int
    world: str
    size: int
    kind: str
    victim: int
    moment: float


def plan(seed: int, names: list[str]) -> Fault:
    """The trial of a seed.

    Example:
      >>> plan(1, ["shm"]) == plan(1, ["shm"])
      True
    """
    draw = random.Random(seed)
    size, kind = draw.choice([2, 3, 4]), draw.choice(KINDS)
    moment = draw.uniform(0.0, 0.2) if kind in SIGNALS else draw.randrange(200)
    return Fault(seed, draw.choice(names), size, kind, draw.randrange(size), moment)


def expected(counts: np.ndarray, size: int, scale: int) -> np.ndarray:
    """The sum of what all ranks contribute: `counts` times rank + scale."""
    return counts * sum(r + scale for r in range(size))


def schedule(world: ss.Backend, fault: Fault, strike_now: Any, last: str) -> None:
    """Random operations, the same on all ranks, with exact results, until one raises or the file `last` exists.

    Counts right and wrong ones in `schedule.found`, and keeps its arrays in `schedule.arrays`.
    """
    draw = random.Random(fault.seed)
    rank, size = world.rank, world.size
    schedule.arrays = []  # type: ignore[attr-defined]
    pair = world.split(rank % 2)
    shared = world.zeros(40_000)
    is_last = np.zeros(1)
    found: collections.Counter = collections.Counter()
    schedule.found = found  # type: ignore[attr-defined]  # for the handler of the exception
    for step in itertools.count():
        if fault.kind not in SIGNALS and rank == fault.victim and step == fault.moment:
            strike_now()
        if step % 20 == 0:
            is_last[0] = os.path.exists(last)
            if world.allreduce(is_last)[0]:
                return
        count, what = draw.choice([1, 300, 20_000, 200_000]), draw.randrange(8)
        base = np.arange(count) % 13 + 1.0
        mine = base * (rank + step % 7)
        into = np.empty_like(base)
        schedule.arrays = [base, mine, into, is_last]  # type: ignore[attr-defined]
        right = expected(base, size, step % 7)
        root = draw.randrange(size)
        if what == 0:
            good = np.array_equal(world.allreduce(mine), right)
        elif what == 1:
            shared[...] = rank + 1.0
            good = bool(np.all(world.allreduce(shared) == size * (size + 1) / 2))
        elif what == 2:
            good = np.array_equal(
                world.bcast(base * step if rank == root else base * 0, root=root), base * step
            )
        elif what == 3:
            good = np.array_equal(world.allgather(mine[:300])[root], (base * (root + step % 7))[:300])
        elif what == 4:
            world.barrier()
            good = True
        elif what == 5:
            works = [world.iallreduce(mine.copy()) for _ in range(3)]
            good = all(np.array_equal(work.wait(), right) for work in works)
        elif what == 6:
            world.sendrecv(mine, (rank + 1) % size, into, (rank - 1) % size)
            good = np.array_equal(into, base * ((rank - 1) % size + step % 7))
        else:
            members = [r for r in range(size) if r % 2 == rank % 2]
            good = np.array_equal(pair.allreduce(mine.copy()), base * sum(r + step % 7 for r in members))
        found["right" if good else "wrong"] += 1


def run_rank(rank: int, fault: Fault, folder: str, report: int) -> None:
    """One rank, in a process of its own. Writes what it found as one line of JSON."""
    os.environ["SAMESTEP_NATIVE_TRANSPORT"] = "auto" if fault.world == "hierarchical" else fault.world
    if fault.world == "hierarchical":
        os.environ["SAMESTEP_HOST_ID"] = str(rank // 2)

    def strike_now() -> None:
        os.write(report, (json.dumps({"fault": time.time()}) + "\n").encode())
        if fault.kind in faults.KINDS:
            faults.strike(fault.kind, random.Random(fault.seed), {report})
            return
        if fault.kind == "exit":
            os._exit(3)
        if fault.kind == "raise":
            raise KeyError("no such batch")
        raise SystemExit(0)

    world = ss.initialize(
        "native",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=fault.size,
        timeout=20.0,
    )
    world.barrier()
    world._timeout = TIMEOUT_S
    os.write(report, b'{"ready": 1}\n')
    kind, text, changed, at = "", "", 0, 0.0
    try:
        schedule(world, fault, strike_now, f"{folder}/last")
    except ss.Error as error:
        kind, text, at = type(error).__name__, str(error), time.time()
        if fault.kind == "wake" and rank != fault.victim:
            changed = _changed_later(fault, rank, folder)
    except (MemoryError, OSError) as error:  # of the program itself, which ends
        kind, text, at = type(error).__name__, str(error), time.time()
        world._abandon(f"it ended with {error!r}", finished=False)
    except (KeyError, SystemExit) as error:  # the victim, which ends as a program does
        reason = "its program has ended" if isinstance(error, SystemExit) else f"it ended with {error!r}"
        world._abandon(reason, finished=isinstance(error, SystemExit))
        os._exit(0)
    found = getattr(schedule, "found", {})
    line = {"rank": rank, "kind": kind, "text": text, "at": at, "changed": changed, **found}
    with contextlib.suppress(ss.Error):  # if only a sub-group had ended
        ss.finalize()
    os.write(report, (json.dumps(line) + "\n").encode())
    os._exit(0)


def _changed_later(fault: Fault, rank: int, folder: str) -> int:
    """Lets the victim go on, once all survivors have their errors. How many bytes of this rank's arrays it changed."""
    arrays = [array.view(np.uint8) for array in schedule.arrays]  # type: ignore[attr-defined]
    before = [array.copy() for array in arrays]
    with open(f"{folder}/failed.{rank}", "w"):
        pass
    until = time.monotonic() + PATIENCE_S
    while not os.path.exists(f"{folder}/woken") and time.monotonic() < until:
        time.sleep(0.005)
    return sum(int((one != other).sum()) for one, other in zip(before, arrays, strict=True))


class Outcome(NamedTuple):
    """What became of the survivors of one fault."""

    fault: Fault
    lines: list[dict[str, Any]]
    ends: dict[int, int]  # exit codes by rank; of those that hung, none
    struck: float

    def survivors(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("rank", self.fault.victim) != self.fault.victim]

    def hung(self) -> int:
        return self.fault.size - len(self.ends)

    def crashed(self) -> int:
        return sum(code != 0 for rank, code in self.ends.items() if rank != self.fault.victim)


def strike(fault: Fault) -> Outcome:
    """Runs one trial."""
    ours, report = os.pipe()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        pids = {}
        for rank in range(fault.size):
            pid = os.fork()
            if pid == 0:
                os.close(ours)
                try:
                    run_rank(rank, fault, folder, report)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(70)
            pids[pid] = rank
        os.close(report)
        lines, struck = _watch(ours, fault, pids)
        ends = _reap(pids, fault, folder, struck)
        for piece in iter(lambda: os.read(ours, 1 << 16), b""):
            lines.append(piece)
    found = [json.loads(line) for line in b"".join(lines).splitlines()]
    struck = next((line["fault"] for line in found if "fault" in line), struck)
    return Outcome(fault, found, ends, struck)


def _watch(ours: int, fault: Fault, pids: dict[int, int]) -> tuple[list[bytes], float]:
    """Reads until all ranks are ready, and strikes or waits until the victim does so. What was read, and when."""
    lines: list[bytes] = []
    strikes_itself = fault.kind not in SIGNALS
    until = time.monotonic() + START_S

    def is_awaited() -> bool:
        read = b"".join(lines)
        return read.count(b"ready") < fault.size or (strikes_itself and b'"fault"' not in read)

    # A busy machine may take long for the operations before the fault: the patience of `_reap` begins after it.
    while is_awaited() and time.monotonic() < until:
        if not select.select([ours], [], [], 1.0)[0]:
            continue
        piece = os.read(ours, 4096)
        if not piece:
            break  # a rank has ended before
        lines.append(piece)
    if fault.kind in SIGNALS:
        time.sleep(fault.moment)  # the moment; nobody waits for it
        os.kill(_victim(pids, fault), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    return lines, time.time()


def _victim(pids: dict[int, int], fault: Fault) -> int:
    return next(pid for pid, rank in pids.items() if rank == fault.victim)


def _reap(pids: dict[int, int], fault: Fault, folder: str, struck: float) -> dict[int, int]:
    """Waits for the survivors, then ends what is left. Exit codes of those that ended by themselves."""
    ends: dict[int, int] = {}
    until = time.monotonic() + PATIENCE_S
    left, to_wake = dict(pids), _victim(pids, fault)
    awaited = set(range(fault.size)) - ({fault.victim} if fault.kind in ENDS else set())
    while time.monotonic() < until and awaited.intersection(left.values()):
        if fault.kind == "pause" and to_wake and time.time() - struck > TIMEOUT_S / 3:
            os.kill(to_wake, signal.SIGCONT)
            to_wake = 0
        if fault.kind not in ENDS and time.time() - struck > TIMEOUT_S / 3 + LAST_S:
            _touch(f"{folder}/last")
        if (
            fault.kind == "wake"
            and to_wake
            and sum("failed" in name for name in os.listdir(folder)) == fault.size - 1
        ):
            os.kill(to_wake, signal.SIGCONT)
            to_wake = 0
        if fault.kind == "wake" and fault.victim not in left.values():
            _touch(f"{folder}/woken")
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ends[left.pop(pid)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for pid, rank in left.items():
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if rank not in awaited:
            ends[rank] = os.waitstatus_to_exitcode(status)
    return ends


def _touch(path: str) -> None:
    with open(path, "w"):
        pass


def table(outcomes: list[Outcome]) -> str:
    """A row for each kind of fault, in Markdown. Pure."""
    heads = [
        "fault",
        "faults",
        "survivors",
        "hung",
        "crashed",
        "operations",
        "wrong",
        "overwritten",
        "errors",
        "seconds: median, most",
    ]
    rows = [heads, ["---"] * len(heads)]
    for kind in [*KINDS, "all"]:
        of_kind = [o for o in outcomes if kind in (o.fault.kind, "all")]
        lines = [line for o in of_kind for line in o.survivors()]
        errors = collections.Counter(line["kind"] or "none" for line in lines)
        seconds = [line["at"] - o.struck for o in of_kind for line in o.survivors() if line["kind"]]
        numbers = [
            len(of_kind),
            len(lines),
            sum(o.hung() for o in of_kind),
            sum(o.crashed() for o in of_kind),
            sum(line.get("right", 0) + line.get("wrong", 0) for line in lines),
            sum(line.get("wrong", 0) for line in lines),
            sum(line["changed"] for line in lines),
            ", ".join(f"{n} {name}" for name, n in sorted(errors.items())) or "-",
            f"{statistics.median(seconds):.2f}, {max(seconds):.2f}" if seconds else "-",
        ]
        rows.append([kind, *map(str, numbers)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def is_bad(outcome: Outcome) -> bool:
    """Has a rank hung, a survivor crashed, gone on without an error, or computed or kept something wrong?

    A rank that has run out of something may fail or not: if it does, all others have to learn it.
    """
    fault, lines = outcome.fault, outcome.survivors()
    victim = [line for line in outcome.lines if line.get("rank") == fault.victim]
    must_fail = (
        fault.kind in ENDS or outcome.ends.get(fault.victim) != 0 or any(line["kind"] for line in victim)
    )
    odd = any(line.get("wrong", 0) or line["changed"] for line in [*lines, *victim])
    odd |= must_fail and not all(line["kind"] for line in lines)
    odd |= fault.kind in HARMLESS and any(line["kind"] for line in [*lines, *victim])
    odd |= any(line["kind"] in ("MemoryError", "OSError") for line in lines)
    return bool(outcome.hung() or outcome.crashed() or odd or len(lines) != fault.size - 1)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1, help="of the first fault; the next ones count on")
    parser.add_argument("--jobs", type=int, default=4, help="faults at a time; their ranks mostly wait")
    parser.add_argument("--world", action="append", choices=WORLDS, help="the transport; default: all")
    given = parser.parse_args(argv)
    outcomes = []
    plans = [plan(seed, given.world or list(WORLDS)) for seed in range(given.seed, given.seed + given.faults)]
    with concurrent.futures.ProcessPoolExecutor(given.jobs) as pool:
        for outcome in pool.map(strike, plans):
            outcomes.append(outcome)
            if is_bad(outcome):
                print(f"bad: {outcome}", flush=True)
    print(table(outcomes))
    return int(any(map(is_bad, outcomes)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

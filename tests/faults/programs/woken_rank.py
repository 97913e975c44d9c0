"""Stops a rank inside a call, lets it go on after the others' error, and looks whether it wrote into their arrays.

    python tests/faults/programs/woken_rank.py --trials 1000 --world shm

Prints a line for each trial in which an array of a survivor was changed or its sum was wrong, and what it has counted.
Exits with 1 if there was such a trial.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import samestep as ss

SIZES = {"shm": 3, "tcp": 3, "hierarchical": 4, "mpi": 3}
TIMEOUT_S = 0.4  # of a call; a trial takes a little longer
PATIENCE_S = 60.0
MANY, FEW = 2_000_000, 8_000  # elements
MARK = 777.0  # what a survivor stores after its error


def ones(world, count):
    return np.ones(count)


def shared(world, count):
    return world.zeros(count)


def blocks(world, count):
    return np.ones((world.size, count))


# What the call writes into, of how many elements, and the call `f(world, array, last)`: the last rank is the victim.
CALLS = {
    "allreduce": (ones, MANY, lambda w, x, last: w.allreduce(x)),
    "allreduce of few elements": (ones, FEW, lambda w, x, last: w.allreduce(x)),
    "allreduce in shared memory": (shared, MANY, lambda w, x, last: w.allreduce(x)),
    "allreduce of few elements in shared memory": (shared, FEW, lambda w, x, last: w.allreduce(x)),
    "reduce": (ones, MANY, lambda w, x, last: w.reduce(x)),
    "reduce_scatter": (ones, MANY, lambda w, x, last: w.reduce_scatter(blocks(w, MANY), out=x)),
    "bcast": (ones, MANY, lambda w, x, last: w.bcast(x, root=last)),
    "bcast in shared memory": (shared, MANY, lambda w, x, last: w.bcast(x, root=last)),
    "gather": (blocks, MANY, lambda w, x, last: w.gather(np.ones(MANY), out=x if w.rank == 0 else None)),
    "scatter": (
        ones,
        MANY,
        lambda w, x, last: w.scatter(blocks(w, MANY) if w.rank == last else None, root=last, out=x),
    ),
    "allgather": (blocks, MANY, lambda w, x, last: w.allgather(np.ones(MANY), out=x)),
    "alltoall": (blocks, MANY, lambda w, x, last: w.alltoall(blocks(w, MANY), out=x)),
    "messages": (ones, MANY, lambda w, x, last: pass_on(w, x)),
    "arrays of a tree": (
        shared,
        FEW * 16,
        lambda w, x, last: w.synchronize(list(x.reshape(16, FEW)), root=last),
    ),
}
INSIDE = ("allreduce", "allreduce in shared memory")  # long enough to be stopped in the middle


def pass_on(world, array):
    world.sendrecv(np.ones(MANY), (world.rank + 1) % world.size, array, (world.rank - 1) % world.size)


class NotStartedError(Exception):
    """mpirun has ended before a rank came; with what it said."""


class Trial(NamedTuple):
    """`twice`: the survivors go on in a second world. `moment`: of the signal, in seconds after the start; None: the
    victim stops itself in the middle of an allreduce."""

    kind: str
    call: str
    twice: bool
    moment: float | None

    @property
    def size(self):
        return SIZES[self.kind]


def connect(folder):
    control = socket.socket(socket.AF_UNIX)
    control.connect(f"{folder}/control")
    return control


def say(control, **found):
    control.sendall(json.dumps(found).encode() + b"\n")


def start(folder, trial, rank, name, size=None):
    if trial.kind == "mpi":
        return ss.initialize("mpi", timeout=PATIENCE_S)
    return ss.initialize(
        "native",
        init_method=f"file://{folder}/{name}",
        rank=rank,
        world_size=size or trial.size,
        timeout=PATIENCE_S,
    )


def stop_in_the_middle(array):
    """Stops this process once the first elements have been reduced and the last ones not."""
    while array[0] == array[-1]:
        pass
    os.kill(os.getpid(), signal.SIGSTOP)


def run_rank(folder, trial, rank):
    """The call in a loop until it fails. Then the victim ends, and the others look at their arrays until it has."""
    world = start(folder, trial, rank, "first")
    rank, last = world.rank, trial.size - 1
    make, count, call = CALLS[trial.call]
    array = make(world, count)
    array[...] = 1.0
    world.barrier()
    control = connect(folder)
    say(control, rank=rank, pid=os.getpid())
    world._timeout = TIMEOUT_S
    if trial.moment is None and rank == last:
        threading.Thread(target=stop_in_the_middle, args=(array,), daemon=True).start()
    try:
        while True:
            call(world, array, last)
    except ss.Error as error:
        failed = type(error).__name__
    if rank != last and trial.twice:
        ss.finalize()
        world = start(folder, trial, rank, "second", last)
    elif rank != last:
        array[...] = MARK
    say(control, error=failed)
    if rank == last:
        if trial.kind == "mpi":  # whose launcher ends the others once a rank has ended
            control.recv(1)
        return
    control.setblocking(False)
    wrong = wrong_in_new_world(world, array, control) if trial.twice else changed(array, control, trial.kind)
    say(control, changed=wrong)


def changed(array, control, kind):
    """Waits until the victim has got its error, too. Returns how many elements have changed."""
    while not heard(control):
        if kind == "mpi":  # its messages arrive while somebody calls it
            importlib.import_module("mpi4py.MPI").COMM_WORLD.Iprobe()
    return int(np.count_nonzero(array != MARK))


def wrong_in_new_world(world, array, control):
    """The same, while the survivors reduce the array all the time. Returns the number of wrong elements."""
    new, right, wrong = world.zeros(array.shape), world.size * (world.size + 1) / 2, 0
    while not world.any(heard(control)):
        for each in (array, new):
            each[...] = world.rank + 1.0
            world.allreduce(each)
            wrong += int(np.count_nonzero(each != right))
    ss.finalize()
    return wrong


def heard(control):
    with contextlib.suppress(BlockingIOError):
        return bool(control.recv(1))
    return False


def start_ranks(folder, trial):
    """Of native worlds the pids; of MPI that of mpirun."""
    if trial.kind == "mpi":
        command = ["mpirun", "-n", str(trial.size), "--oversubscribe", sys.executable, __file__]
        command += [
            "--world",
            "mpi",
            "--rank-in",
            folder,
            "--call",
            trial.call,
            *(["--inside"] if trial.moment is None else []),
        ]
        environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environment |= {**os.environ, "SAMESTEP_MPI_TRANSPORT": "mpi"}
        with open(f"{folder}/stderr", "wb") as stderr:
            return [subprocess.Popen(command, env=environment, stderr=stderr).pid]
    pids = []
    for rank in range(trial.size):
        pid = os.fork()
        if pid == 0:
            try:
                os.environ["SAMESTEP_NATIVE_TRANSPORT"] = (
                    "auto" if trial.kind == "hierarchical" else trial.kind
                )
                if trial.kind == "hierarchical":
                    os.environ["SAMESTEP_HOST_ID"] = str(rank // 2)
                run_rank(folder, trial, rank)
            except BaseException as error:
                print(f"rank {rank}: {error!r}", flush=True)
            finally:
                os._exit(0)
        pids.append(pid)
    return pids


def run(trial):
    """The errors of the survivors, and how many elements of each were wrong."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/control")
        listener.listen()
        listener.settimeout(0.5)
        started = start_ranks(folder, trial)
        pids, files = {}, {}
        try:
            for _ in range(trial.size):
                connection = accept(listener, folder, started)
                connection.settimeout(PATIENCE_S)
                file = connection.makefile("rwb", buffering=0)
                hello = json.loads(file.readline())
                pids[hello["rank"]], files[hello["rank"]] = hello["pid"], file
            victim = files.pop(trial.size - 1)
            if trial.moment is not None:
                time.sleep(trial.moment)  # nobody waits for it
                os.kill(pids[trial.size - 1], signal.SIGSTOP)
            errors = [json.loads(file.readline())["error"] for file in files.values()]
            os.kill(pids[trial.size - 1], signal.SIGCONT)
            victim.readline()  # its error: from now on it runs no operation
            for file in files.values():
                file.write(b"!")
            return errors, [json.loads(file.readline())["changed"] for file in files.values()]
        finally:
            for pid in {*started, *pids.values()}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in started:
                with contextlib.suppress(ChildProcessError):  # see `accept`
                    os.waitpid(pid, 0)


def accept(listener, folder, started):
    """The connection of the next rank. On a busy machine mpirun sometimes ends at once, with an error of its own."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            return listener.accept()[0]
        if len(started) == 1 and os.waitpid(started[0], os.WNOHANG) != (0, 0):
            raise NotStartedError(Path(folder, "stderr").read_text())
    raise TimeoutError("no rank came")


def trials(args):
    """As many as wanted: the calls one after the other, and every other time in a second world."""
    calls = [args.call] if args.call else [call for call in CALLS if not args.inside or call in INSIDE]
    for number in range(args.trials):
        moment = None if args.inside else random.Random(args.seed + number).uniform(0, 0.05)
        twice = args.world != "mpi" and number // len(calls) % 2 == 1
        yield Trial(args.world, calls[number % len(calls)], twice, moment)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", choices=SIZES, default="shm")
    parser.add_argument("--call", choices=CALLS)
    parser.add_argument("--inside", action="store_true", help="stops in the middle of an allreduce")
    parser.add_argument("--rank-in", help=argparse.SUPPRESS)  # what mpirun starts
    args = parser.parse_args()
    if args.rank_in:
        run_rank(args.rank_in, next(trials(args)), 0)
        os._exit(0)
    found: collections.Counter = collections.Counter()
    for trial in trials(args):
        try:
            errors, wrong = run(trial)
        except NotStartedError as error:
            found["not started"] += 1
            print(f"{trial}: {error}", flush=True)
            continue
        except (OSError, ValueError) as error:
            errors, wrong = [], []
            print(f"{trial}: {error!r}", flush=True)
        found["trials"] += 1
        found["timed out"] += "TimeoutError" in errors
        found["broken"] += not errors
        found["changed"] += any(wrong)
        if any(wrong):
            print(f"{trial}: {wrong} elements", flush=True)
    print(json.dumps({"world": args.world, **found}))
    sys.exit(bool(found["changed"] or found["broken"] or found["not started"] > found["trials"] // 20))


if __name__ == "__main__":
    main()

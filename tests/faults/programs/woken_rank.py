"""Stops a rank inside a call, lets it go on after the others' error, and looks whether it wrote into their arrays.

    python tests/faults/programs/woken_rank.py --trials 1000 --world shm

Prints a line for each trial in which an array of a survivor was changed or its sum was wrong, and what it has counted.
Exits with 1 if there was such a trial. MPI: run it as root of the container or not; it calls mpirun.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

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


def pass_on(world, array):
    world.sendrecv(np.ones(MANY), (world.rank + 1) % world.size, array, (world.rank - 1) % world.size)


def connect(folder):
    control = socket.socket(socket.AF_UNIX)
    control.connect(f"{folder}/control")
    return control


def say(control, **found):
    control.sendall(json.dumps(found).encode() + b"\n")


def start(folder, kind, rank, size, name):
    if kind == "mpi":
        return ss.initialize("mpi", timeout=PATIENCE_S)
    return ss.initialize(
        "native", init_method=f"file://{folder}/{name}", rank=rank, world_size=size, timeout=PATIENCE_S
    )


def run_rank(folder, kind, call, rank, size):
    """One rank: the call in a loop until it fails. The victim ends after that, the others look at their arrays."""
    world = start(folder, kind, rank, size, "first")
    rank, last = world.rank, world.size - 1
    make, count, run = CALLS[call]
    array = make(world, count)
    world.barrier()
    control = connect(folder)
    say(control, rank=rank, pid=os.getpid())
    world._timeout = TIMEOUT_S
    try:
        while True:
            run(world, array, last)
    except ss.Error as error:
        say(control, error=type(error).__name__)
    if rank == last:
        return
    array[...] = MARK
    control.recv(1)  # the victim has got its error, too
    changed = int(np.count_nonzero(array != MARK))
    say(control, changed=changed)


def run_rank_twice(folder, kind, call, rank, size):
    """The same, but the survivors go on in a world of their own, with the array of the old one."""
    world = start(folder, kind, rank, size, "first")
    last = size - 1
    make, count, run = CALLS[call]
    array = make(world, count)
    control = connect(folder)
    say(control, rank=rank, pid=os.getpid())
    world._timeout = TIMEOUT_S
    try:
        while True:
            run(world, array, last)
    except ss.Error as error:
        if rank == last:
            say(control, error=type(error).__name__)
            return
        failed = type(error).__name__
    ss.finalize()
    del world
    control.setblocking(False)
    world = start(folder, kind, rank, last, "second")
    right, wrong = last * (last + 1) / 2, 0
    new = make(world, count)
    say(control, error=failed)
    more = True
    while more:
        for each in (array, new):
            each[...] = rank + 1.0
            world.allreduce(each)
            wrong += int(np.count_nonzero(each != right))
        ended = False
        with contextlib.suppress(BlockingIOError):
            ended = bool(control.recv(1))
        more = not world.any(ended)
    ss.finalize()
    say(control, changed=wrong)


def start_ranks(folder, kind, call, twice):
    """Of native worlds the pids; of MPI that of mpirun."""
    size = SIZES[kind]
    if kind == "mpi":
        command = [
            "mpirun",
            "-n",
            str(size),
            "--oversubscribe",
            sys.executable,
            __file__,
            "--rank-in",
            folder,
        ]
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        process = subprocess.Popen(
            [*command, "--call", call],
            env={**os.environ, **allowed, "SAMESTEP_MPI_TRANSPORT": "mpi"},
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        return [process.pid]
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                os.environ["SAMESTEP_NATIVE_TRANSPORT"] = "auto" if kind == "hierarchical" else kind
                if kind == "hierarchical":
                    os.environ["SAMESTEP_HOST_ID"] = str(rank // 2)
                (run_rank_twice if twice else run_rank)(folder, kind, call, rank, size)
            except BaseException as error:
                print(f"rank {rank}: {error!r}", flush=True)
            finally:
                os._exit(0)
        pids.append(pid)
    return pids


def trial(kind, call, twice, moment):
    """Returns the errors of the survivors, the numbers of wrong elements, and whether all went as planned."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/control")
        listener.listen()
        listener.settimeout(PATIENCE_S)
        started = start_ranks(folder, kind, call, twice)
        pids, files = {}, {}
        try:
            for _ in range(SIZES[kind]):
                connection = listener.accept()[0]
                connection.settimeout(PATIENCE_S)
                file = connection.makefile("rwb", buffering=0)
                hello = json.loads(file.readline())
                pids[hello["rank"]], files[hello["rank"]] = hello["pid"], file
            victim = files.pop(SIZES[kind] - 1)
            time.sleep(moment)  # nobody waits for it
            os.kill(pids[SIZES[kind] - 1], signal.SIGSTOP)
            errors = [json.loads(file.readline())["error"] for file in files.values()]
            os.kill(pids[SIZES[kind] - 1], signal.SIGCONT)
            victim.readline()  # its error: from now on it runs no operation
            for file in files.values():
                file.write(b"!")
            return errors, [json.loads(file.readline())["changed"] for file in files.values()]
        finally:
            for pid in {*started, *pids.values()}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in started:
                os.waitpid(pid, 0)


def run_trials(kind, n_trials, calls, seed=0):
    """Counts the trials, those whose survivors had to give up, and those in which they found something wrong."""
    found: collections.Counter = collections.Counter()
    for number in range(n_trials):
        draw = random.Random(seed + number)
        call, moment = calls[number % len(calls)], draw.uniform(0, 0.05)
        twice = kind != "mpi" and number // len(calls) % 2 == 1
        try:
            errors, changed = trial(kind, call, twice, moment)
        except (OSError, ValueError) as error:
            found["broken"] += 1
            print(f"{kind}, seed {seed + number}, {call}, twice {twice}: {error!r}", flush=True)
            continue
        found["trials"] += 1
        found["timed out"] += "TimeoutError" in errors
        found["changed"] += any(changed)
        if any(changed):
            print(f"{kind}, seed {seed + number}, {call}, twice {twice}: {changed} elements", flush=True)
    return dict(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", choices=SIZES, default="shm")
    parser.add_argument("--call", choices=CALLS)
    parser.add_argument("--rank-in", help=argparse.SUPPRESS)  # what mpirun starts
    args = parser.parse_args()
    if args.rank_in:
        run_rank(args.rank_in, "mpi", args.call, 0, SIZES["mpi"])
        os._exit(0)
    found = run_trials(args.world, args.trials, [args.call] if args.call else list(CALLS), args.seed)
    print(json.dumps({"world": args.world, **found}))
    sys.exit(bool(found.get("changed") or found.get("broken")))


if __name__ == "__main__":
    main()

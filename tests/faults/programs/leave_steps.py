"""Leaves blocks of `together()` by each kind of exit, each rank in turn; at the end the last rank exits within one."""

import os
import signal
import sys

import numpy as np
import samestep as ss

if hosts := os.environ.get("PRETENDED_HOSTS"):  # of each rank
    os.environ["SAMESTEP_HOST_ID"] = hosts[int(os.environ["RANK"])]

KINDS = ("before", "between", "after", "message", "node", "interrupt", "interrupted wait")
SOON_S = 0.05  # while the rank waits for what nobody sends


def leave(backend, kind, values):
    if kind == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        backend.recv(values)
    if kind == "interrupted wait":
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, SOON_S)
        backend.irecv(values).wait()
    raise ValueError("a bad batch")


def step(backend, kind):
    """A step that this rank leaves at the place `kind`; None for a rank that does not leave."""
    rank, size = backend.rank, backend.size
    values = np.ones(200_000)
    with backend.together():
        for place in KINDS:
            if place == "between":
                backend.allreduce(values)
            elif place == "after":
                backend.allreduce_gradients({"a": values, "b": [np.ones(3)]})
            elif place == "message":
                backend.sendrecv(values, (rank + 1) % size, np.empty_like(values), (rank - 1) % size)
            elif place == "node":
                backend.node.allreduce(values)
                backend.cross.allreduce(values)
            if kind == place:
                leave(backend, kind, values)
        backend.barrier()


def check(backend, kind, who):
    is_interrupt = kind.startswith("interrupt")
    try:
        step(backend, kind if backend.rank == who else None)
    except ss.StepError as error:
        assert (error.rank, error.kind) == (who, "KeyboardInterrupt" if is_interrupt else "ValueError"), error
    except KeyboardInterrupt:
        assert backend.rank == who and is_interrupt
    else:
        raise AssertionError("nothing was raised")
    assert backend.allreduce(1) == backend.size and backend.node.allreduce(1) == backend.node.size
    assert (backend.allreduce(np.ones(300_000)) == backend.size).all()


def exit_within(backend):
    try:
        with backend.together():
            if backend.rank == backend.size - 1:
                sys.exit(0)
            backend.barrier()
    except ss.StepError as error:
        print("left:", error.rank, error.kind, flush=True)
        try:
            backend.barrier()
        except ss.PeerLostError:
            print("has gone", flush=True)


world = ss.initialize(timeout=60)
for i in range(2 * len(KINDS)):
    check(world, KINDS[i % len(KINDS)], i % world.size)
print("all steps", flush=True)
exit_within(world)

"""Calls on lists of arrays end at their deadline."""

import types

import numpy as np
import pytest
import samestep.distributed as dist
from samestep import _core
from samestep._util import deadline
from samestep.distributed import groups

STEP, GIVEN = 3.0, 10.0  # seconds on a clock that only steps move


class Step:
    """An operation that takes 3 s, and knows how long it would have been waited for."""

    def __init__(self, watch, inner=None):
        self.watch, self.inner = watch, inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def wait(self, timeout, *flags):
        self.watch.waits.append(timeout)
        self.watch.now += STEP
        if self.inner is not None:
            self.inner.wait(20.0, *flags)


class Watched:
    """A communicator whose operations are steps."""

    def __init__(self, watch, comm):
        self.watch, self.comm = watch, comm

    def __getattr__(self, name):
        found = getattr(self.comm, name)
        if name not in {"allreduce", "reduce", "bcast", "allgather", "allgatherv"}:
            return found
        return lambda *given: Step(self.watch, found(*given))


@pytest.fixture
def watch(monkeypatch):
    """A clock, and the seconds that steps were given."""
    watch = types.SimpleNamespace(now=100.0, waits=[])
    monkeypatch.setattr(deadline, "time", types.SimpleNamespace(monotonic=lambda: watch.now))
    start = _core.start_list_on_host
    monkeypatch.setattr(
        _core, "start_list_on_host", lambda comm, *given: Step(watch, start(comm.comm, *given))
    )
    return watch


def test_a_call_has_the_time_of_the_group(watch, monkeypatch):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    of = groups.the_world()
    with monkeypatch.context() as patched:
        patched.setattr(of, "_comm", Watched(watch, of._comm))
        patched.setattr(of, "_timeout", GIVEN)
        # Of half types, whose sums are combined in Python.
        xs, slots = [np.ones(3, "f2")], [[np.ones(3, "f2")]]
        for call in (
            lambda: dist.all_reduce_multigpu(xs),
            lambda: dist.reduce_multigpu(xs, 0),
            lambda: dist.broadcast_multigpu(xs, 0),
            lambda: dist.all_gather_multigpu(slots, xs),
        ):
            del watch.waits[:]
            call()
            assert watch.waits == [10.0]
    dist.destroy_process_group()

"""Calls on lists of arrays end at their deadline."""

import types

import numpy as np
import pytest
import samestep as ss
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


@pytest.fixture
def backend(watch, monkeypatch):
    backend = ss.initialize("native", timeout=60.0)
    monkeypatch.setattr(backend, "_comm", Watched(watch, backend._comm))
    yield backend
    monkeypatch.undo()
    ss.finalize()


CALLS = {
    "allreduce": lambda on, xs, **keywords: on.allreduce_multi(xs, **keywords),
    "reduce": lambda on, xs, **keywords: on.reduce_multi(xs, **keywords),
    "bcast": lambda on, xs, **keywords: on.bcast_multi(xs, **keywords),
    "allgather": lambda on, xs, **keywords: on.allgather_multi(xs, **keywords),
}


@pytest.mark.parametrize("verb", CALLS)
def test_a_call_has_the_time_that_it_is_given(backend, watch, verb):
    CALLS[verb](backend, [np.ones(3), np.ones(3)], timeout=GIVEN)
    assert watch.waits == [10.0]
    del watch.waits[:]
    CALLS[verb](backend, [np.ones(3), np.ones(3)])
    assert watch.waits == [60.0]


def test_what_is_waited_for_later_has_time_of_its_own(backend, watch):
    started = backend.iallreduce_multi([np.ones(3)])
    started.wait()
    assert watch.waits == [60.0]


def test_functions_of_2019_do_as_well(watch, monkeypatch):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    of = groups.the_world()
    with monkeypatch.context() as patched:
        patched.setattr(of, "_comm", Watched(watch, of._comm))
        patched.setattr(of, "_timeout", GIVEN)
        xs, slots = [np.ones(3)], [[np.ones(3)]]
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

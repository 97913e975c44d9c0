"""Coroutines that stop waiting leave the event loop, the group and the messages as they are; signals are not lost."""

import pytest
from native_ranks import PATIENCE_S
from running import program

SOON_S = 5.0  # on a busy machine; the deadline of the group is 30 s


def test_a_receive_that_is_given_up_takes_no_message(ranks):
    job = ranks(program("faults/asyncio_waits", "give_up_a_receive"), 2)
    for rank in range(2):
        found = job.report(rank)
        assert found["late"]
        assert max(found["seconds"], found["gap"]) < SOON_S
        assert job.report(rank) == {"out": [7.0] * 5, "total": [2.0]}


def test_an_allreduce_that_is_given_up_goes_on(ranks):
    job = ranks(program("faults/asyncio_waits", "give_up_an_allreduce"), 2)
    found = job.report(0)
    assert found["late"]
    assert max(found["seconds"], found["gap"]) < SOON_S
    assert job.report(1) == {"first": [2.0]}
    for rank in range(2):
        assert job.report(rank) == {"total": [2.0]}


def test_ctrl_c_while_a_dropped_work_waits_is_raised(ranks):
    job = ranks(program("faults/asyncio_waits", "interrupt_a_dropped_work"), 2)
    assert job.report(0) == {"interrupted": True}
    for process in job.processes:
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("verb", ["objects", "tree", "lengths"])
def test_an_exception_of_a_handler_in_a_call_of_several_operations_ends_the_group(ranks, verb):
    job = ranks(program("faults/asyncio_waits", "raise_in_a_call", verb), 2)
    assert job.report(0) == {"error": "Stopped"}
    assert job.report(1)["error"] in ("", "PeerLostError")
    for rank in range(2):
        assert job.report(rank)["then"] != ""

"""Programs end as ever while their daemon threads are in samestep."""

import sys

import pytest
from native_ranks import PATIENCE_S
from running import program

VERBS = (
    ("a small allreduce", "a large allreduce", "a barrier", "a receive"),
    ("messages", "a broadcast of an object", "a Work", "a dropped Work"),
    ("a tree", "a group"),
    ("an array of a class",) * 3,
)


@pytest.mark.parametrize("verbs", VERBS, ids=lambda verbs: verbs[0])
def test_a_program_ends_during_calls_of_daemon_threads(ranks, verbs):
    if verbs[0] == "an array of a class" and sys.version_info < (3, 11):
        pytest.skip(
            "calls of Python code are inline in the headers of Python 3.10, and end as that ends threads"
        )
    job = ranks(program("faults/daemon_threads", "end_during", *verbs), 2)
    for rank in range(2):
        assert job.report(rank) == {"ended": True}
    for process in job.processes:
        assert process.wait(PATIENCE_S) == 0


def test_what_the_other_rank_has_finished_is_finished_here_too(ranks, tmp_path):
    job = ranks(program("faults/daemon_threads", "end_before_the_other_looks"), 2)
    assert job.report(1) == {"total": 2.0}
    assert job.processes[1].wait(PATIENCE_S) == 0
    (tmp_path / "ended").touch()
    found = job.report(0)
    assert found["total"] == 2.0
    assert "its program exited" in found["error"]
    assert job.processes[0].wait(PATIENCE_S) == 0

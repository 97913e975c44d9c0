"""A rank that cannot begin a collective on device memory leaves nobody waiting: the others learn which, and why."""

import device_jobs
import pytest
from running import program

WELL_BEFORE_THE_DEADLINE_S = 20.0
ELSEWHERE = "the array is on device 3, but rank"
REASONS = {
    "freed": "does not know its address",
    "out on the host": "one array is in host memory and the other in device memory",
    "in on the host": "one array is in host memory and the other in device memory",
    "of another runtime": "the array is not on a device that this group reaches",
    "captured": "the array's stream is being captured",
    "captured average": "the array's stream is being captured",
}
CALLS = [
    *("allreduce", "allreduce", "reduce", "reduce_scatter", "bcast", "allgather", "gather", "scatter"),
    *("alltoall", "allgatherv", "gatherv", "alltoallv"),
    *("allreduce_tree(op=SUM)", "synchronize(root=0, objects='keep')"),
]
BACKENDS = pytest.mark.parametrize(("backend", "n"), [("nccl", 2), ("nccl", 3), ("native", 3)])


def run(tmp_path, n, function, *values):
    ended = device_jobs.run(tmp_path, program("devices/device_refusals", function, *values), n)
    assert [rank.code for rank in ended] == [0] * n, ended
    return ended


def require_told(ended, what, refused, heard):
    """`refused`, `heard`: what the last rank and another one raised."""
    assert refused["kind"] in ("InvalidArgumentError", "UnavailableError"), (what, refused, heard, ended)
    assert heard.get("kind") == "MismatchError", (what, refused, heard)
    last = len(ended) - 1
    assert f"rank {last}: {what} of what this rank cannot take: " in heard["text"], heard
    assert heard["seconds"] < WELL_BEFORE_THE_DEADLINE_S, heard


@BACKENDS
def test_the_others_of_every_collective_learn_why(tmp_path, backend, n):
    *others, last = run(tmp_path, n, "each_verb", backend)
    for rank in others:
        assert len(rank.reports) == len(last.reports) == 2 * len(CALLS), rank
        for i, verb in enumerate(CALLS):
            refused, heard = last.reports[2 * i], rank.reports[2 * i]
            require_told([*others, last], verb, refused, heard)
            assert ELSEWHERE in refused["text"] and ELSEWHERE in heard["text"], (refused, heard)
            assert rank.reports[2 * i + 1] == {"sum": n}, rank


@BACKENDS
def test_the_others_learn_of_every_reason(tmp_path, backend, n):
    *others, last = run(tmp_path, n, "each_reason", backend)
    reasons = [text for why, text in REASONS.items() if backend == "native" or "captured" not in why]
    for rank in others:
        assert len(rank.reports) == len(last.reports) == 2 * len(reasons), rank
        for i, reason in enumerate(reasons):
            refused, heard = last.reports[2 * i], rank.reports[2 * i]
            require_told([*others, last], "allreduce", refused, heard)
            assert reason in refused["text"] and reason in heard["text"], (refused, heard)
            assert rank.reports[2 * i + 1] == {"sum": n}, rank


@BACKENDS
def test_a_world_closes_after_one_rank_alone_was_refused(tmp_path, backend, n):
    *others, last = run(tmp_path, n, "nobody_else_calls", backend)
    refused, closed = last.reports
    assert refused["kind"] == "InvalidArgumentError", last
    for end in (closed, *(rank.reports[0] for rank in others)):
        assert end == {"result": None} or end["seconds"] < WELL_BEFORE_THE_DEADLINE_S, (others, last)
        assert end == {"result": None} or end["kind"] == "MismatchError", (others, last)


@pytest.mark.parametrize("n", [2, 3])
def test_what_was_begun_before_ends_well(tmp_path, n):
    *others, last = run(tmp_path, n, "behind_others", "native")
    for rank in others:
        require_told([*others, last], "allreduce", last.reports[0], rank.reports[0])
    assert [rank.reports[1] for rank in (*others, last)] == [{"result": None}] * n

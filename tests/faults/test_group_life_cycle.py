"""Groups that are made, used and closed leave nothing, and a group that is closed ends its pending operations."""

import pytest
from launching import PATIENCE_S, reports
from running import program

TRANSPORTS = {
    "shared memory": ("--native", {"SAMESTEP_NATIVE_TRANSPORT": "shm"}),
    "tcp": ("--native", {"SAMESTEP_NATIVE_TRANSPORT": "tcp"}),
    "mpi": ("--mpi", {"SAMESTEP_MPI_TRANSPORT": "mpi"}),
}


@pytest.fixture(params=TRANSPORTS)
def run(begin, request):
    """Runs a function of the programs over a transport; returns what each rank printed, by rank."""
    launcher, env = TRANSPORTS[request.param]
    return lambda function, value, n=2, seconds=PATIENCE_S: reports(
        begin(launcher, program("faults/group_life_cycle", function, value), n=n, env=env), seconds
    )


@pytest.mark.slow
@pytest.mark.parametrize("n", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_closed_groups_leave_nothing(run, n):
    for before, after in run("use_groups", n, seconds=PATIENCE_S + n / 10).values():
        fds_before, maps_before, children_before, rss_before = before
        fds_after, maps_after, children_after, rss_after = after
        assert (fds_after, children_after) == (fds_before, children_before)
        assert maps_after - maps_before < n / 20  # malloc adds a few of its own
        assert rss_after - rss_before < 10, (rss_before, rss_after)  # MiB; 300 groups used to leave 75


def test_pending_messages_fail_when_their_group_is_closed(run):
    for closed, outcomes, seconds in run("close_with_pending", "messages").values():
        assert closed == ""
        assert len(outcomes) == 2
        for outcome in outcomes:
            assert outcome.startswith("NotInitializedError: ")
            assert "(group 'world'): the group was closed before the operation ended; wait for it" in outcome
        assert seconds < 20  # of 60


def test_collectives_that_all_ranks_started_are_finished_before_the_group_is_closed(run):
    found = run("close_with_pending", "collectives", n=3)
    assert [outcome[:2] for outcome in found.values()] == [["", ["result"] * 2]] * 3


def test_a_collective_that_another_rank_did_not_start_fails_on_both(run):
    found = run("close_with_pending", "a collective of rank 0")
    assert found[0][1][0].startswith("MismatchError: operation")
    assert found[1][:2] == ["MismatchError", []]
    assert max(seconds for *_, seconds in found.values()) < 20  # of 60

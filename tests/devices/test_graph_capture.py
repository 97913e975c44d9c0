"""Streams that are captured into graphs while the package works: the captures survive it, and so does the group."""

import device_jobs
import fake_arrays
import pytest
from running import program

BACKENDS = pytest.mark.parametrize("backend", ["nccl", "native"])
REFUSED = "the array's stream is being captured into a graph"


def run(tmp_path, function, *values):
    return device_jobs.run(tmp_path, program("devices/device_capture", function, *values), 2)


@BACKENDS
@pytest.mark.parametrize("mode", [fake_arrays.GLOBAL, fake_arrays.THREAD_LOCAL, fake_arrays.RELAXED])
def test_operations_in_progress_leave_a_capture_alone(tmp_path, backend, mode):
    for rank in run(tmp_path, "capture_while_an_operation_is_in_progress", backend, mode):
        assert rank.reports == [{"result": [7.0] * 5, "reduced": 12.0}], rank


def test_what_goes_through_the_host_is_refused_inside_of_a_capture_and_changes_nothing(tmp_path):
    for rank in run(tmp_path, "call_inside_of_a_capture", "native"):
        *refused, result = rank.reports
        assert [one["kind"] for one in refused] == ["UnavailableError"] * 6, rank
        for one in refused:
            assert REFUSED in one["text"], rank
            assert "call it outside of the capture" in one["text"], rank
        assert result == {"result": [3.0] * 3}, rank


@BACKENDS
def test_a_wait_inside_of_a_capture_is_of_the_host(tmp_path, backend):
    for rank in run(tmp_path, "wait_inside_of_a_capture", backend):
        assert rank.reports == [{"result": [3.0] * 3}], rank


@BACKENDS
def test_the_default_stream_is_not_used_while_one_that_waits_for_it_is_captured(tmp_path, backend):
    for rank in run(tmp_path, "use_the_default_stream_while_another_is_captured", backend):
        refused, result = rank.reports
        assert refused["kind"] == "UnavailableError", rank
        assert REFUSED in refused["text"]
        assert result == {"result": [3.0] * 3}, rank


@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_operations_of_nccl_are_part_of_the_graph_in_which_they_were_captured(tmp_path, n):
    ranks = device_jobs.run(tmp_path, program("devices/device_capture", "replay"), n)
    expected = []
    for turn in range(3):
        given = [10.0 * turn + rank for rank in range(n)]
        average = sum(turn + rank for rank in range(n)) / n
        expected += [
            {
                "x": [sum(given)] * 3,
                "y": [sum(given)] * 3 * n,
                "leaf": [max(given)] * 3,
                "half": [average] * 3,
            },
            {"between": float(n)},
        ]
    for rank in ranks:
        assert rank.reports == expected, rank


@pytest.mark.parametrize("deletes", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_close_says_that_graphs_hold_operations(tmp_path, deletes):
    for rank in run(tmp_path, "close_while_a_graph_exists", deletes):
        assert rank.reports == [{"result": [3.0] * 3}, {"closed": True}], rank
        assert ("CUDA graphs that hold its operations still exist" in rank.text) != deletes, rank


def test_all_ranks_capture_an_operation_or_none_does(tmp_path):
    for rank in run(tmp_path, "capture_on_one_rank"):
        (error,) = rank.reports
        assert error["kind"] == "MismatchError", rank
        assert "rank 0: allreduce of float64[3] with op sum captured into a graph" in error["text"]
        assert "rank 1: allreduce of float64[3] with op sum. " in error["text"]


def test_a_rank_that_has_gone_ends_the_group_while_graphs_hold_its_operations(tmp_path):
    first, second = run(tmp_path, "lose_a_peer_while_a_graph_exists")
    assert second.code == 9
    assert len(first.reports) == 1, first
    (error,) = first.reports
    assert error["kind"] == "PeerLostError", first
    assert "rank 1" in error["text"]


def test_an_average_is_not_rounded_inside_of_a_capture(tmp_path):
    for rank in run(tmp_path, "wait_for_an_average_inside_of_a_capture"):
        *refused, pending, result = rank.reports
        assert [one["kind"] for one in refused] == ["UnavailableError"] * 2, rank
        assert all(REFUSED in one["text"] for one in refused), rank
        assert pending == {"done": False, "recorded": 0}
        assert result == {"same": True, "done": True, "result": [1.5] * 3}, rank


def test_every_stream_of_a_tree_is_looked_at(tmp_path):
    for rank in run(tmp_path, "capture_the_stream_of_a_leaf"):
        refused, result = rank.reports
        assert refused["kind"] == "UnavailableError", rank
        assert "leaf [1]: " + REFUSED in refused["text"], rank
        assert result == {"result": [[3.0] * 3] * 2}, rank


def test_new_arrays_are_not_handed_to_a_captured_stream(tmp_path):
    (rank,) = device_jobs.run(tmp_path, program("devices/device_capture", "export_inside_of_a_capture"), 1)
    *refused, end = rank.reports
    assert [one["kind"] for one in refused] == ["UnavailableError"] * 2, rank
    assert end == {"recorded": 0}, rank


def test_an_operation_is_in_the_graph_when_its_call_returns(tmp_path):
    for number, rank in enumerate(run(tmp_path, "wait_after_the_capture")):
        assert len(rank.reports) == 2, rank
        before, after = rank.reports
        assert before == {"x": [number + 1.0] * 3, "y": [number + 1.0] * 3}, rank
        assert after == {"x": [3.0] * 3, "y": [3.0] * 3}, rank


def test_a_wait_in_another_stream_of_the_capture_is_part_of_the_graph(tmp_path):
    for number, rank in enumerate(run(tmp_path, "wait_in_another_stream_of_the_capture")):
        assert rank.reports == [{"x": [number + 1.0] * 3}, {"x": [3.0] * 3}], rank


def test_what_is_captured_in_the_per_thread_stream_is_refused(tmp_path):
    for rank in run(tmp_path, "capture_the_per_thread_stream"):
        *refused, result = rank.reports
        assert [one["kind"] for one in refused] == ["UnavailableError"] * 2, rank
        assert all("per-thread default stream" in one["text"] for one in refused), rank
        assert result == {"recorded": 0, "result": [3.0] * 3}, rank


def test_nothing_of_a_tree_is_captured_if_a_leaf_cannot_be(tmp_path):
    for rank in run(tmp_path, "capture_a_tree_of_which_nccl_lacks_a_leaf"):
        refused, result = rank.reports
        assert refused["kind"] == "UnavailableError", rank
        assert "leaf '[1]'" in refused["text"], rank
        assert result == {"recorded": 0, "result": [[3.0] * 3, [3] * 3]}, rank

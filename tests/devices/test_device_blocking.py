"""Blocking calls return once NCCL has them: what they use lives as long as NCCL needs it."""

import device_jobs
import pytest
from running import program


def run(tmp_path, function, *values):
    return device_jobs.run(tmp_path, program("devices/device_blocking", function, *values), 2)


def test_an_array_is_kept_if_a_signal_handler_leaves_the_call_before_nccl_has_it(tmp_path):
    first, second = run(tmp_path, "leave_by_a_signal")
    left, kept, after = first.reports
    assert left["kind"] == "LeftError", first
    assert kept == {"kept": True}, first
    assert second.reports == [{"result": [3.0] * 3}, {"next": [3.0] * 3}], second
    assert after == {"next": [3.0] * 3}, first


def test_a_forked_process_is_told_that_the_group_is_not_its_own(tmp_path):
    for number, rank in enumerate(run(tmp_path, "call_in_a_forked_process")):
        *refused, result = rank.reports
        assert [one["kind"] for one in refused] == ["NotInitializedError"] * 2, rank
        assert all(f"this process was forked from rank {number}" in one["text"] for one in refused), rank
        assert result == {"result": [4.0] * 3}, rank


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("where", ["world", "group"])
def test_close_raises_what_no_call_has_raised(tmp_path, where, heard):
    for rank in run(tmp_path, "close_after_a_mismatch", where, heard):
        errors = [one for one in rank.reports if "kind" in one]
        assert {one["kind"] for one in errors} == {"MismatchError"}, rank
        assert all("the ranks do not agree" in one["text"] for one in errors), rank
        *_, group, world = rank.reports
        assert world == {"result": None}, rank
        assert "result" in group if heard else len(errors) == 1, rank


def test_a_group_that_raises_as_it_is_closed_leaves_its_parent_closed(tmp_path):
    for rank in run(tmp_path, "close_the_parent_of_a_failed_group"):
        *found, left = rank.reports
        assert [one["kind"] for one in found if "kind" in one] == ["MismatchError"], rank
        assert left == {"left": 0}, rank


@pytest.mark.slow
def test_the_memory_of_a_captured_operation_serves_no_other(tmp_path):
    n = 3
    for number, rank in enumerate(run(tmp_path, "overlap_inside_of_captures", n)):
        allocated, *numbers = rank.reports
        assert allocated["allocated"] >= n - 1, rank  # the first may get what the call before has given back
        assert numbers == [{"numbers": [float(number), 10.0 + number]}] * n, rank

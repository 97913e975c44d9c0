"""Lists of arrays on several devices of each rank, which a rank combines on the host before the ranks communicate."""

import device_jobs
import pytest
from running import program

# Rank r has devices 2 r and 2 r + 1, of which neither need be the one it was started with.
SETTINGS = {"FAKE_GPU_DEVICES": "8", "FAKE_GPU_DELAY_US": "300"}


def run(tmp_path, n, function, *values, **variables):
    settings = SETTINGS | variables
    return device_jobs.run(tmp_path, program("devices/device_lists", function, *values), n, **settings)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "function", ["use_each_operation", "use_samestep_distributed", "use_lists_of_any_kind"]
)
def test_lists_of_device_arrays_get_what_they_should(tmp_path, n, function):
    ended = run(tmp_path, n, function)
    for rank in ended:
        assert rank.code == 0, ended
        assert rank.reports and all(one["ok"] for one in rank.reports), ended


@pytest.mark.parametrize("function", ["reduce_late_arrays", "use_default_streams"])
def test_nothing_is_read_before_it_is_made(tmp_path, function):
    ended = run(tmp_path, 2, function, FAKE_GPU_DELAY_US="1500")
    assert [rank.reports for rank in ended] == [[{"wrong": 0}]] * 2, ended


@pytest.mark.parametrize("what", ["lengths", "counts", "dtypes", "operators"])
def test_ranks_that_differ_are_told_on_all_of_them(tmp_path, what):
    ended = run(tmp_path, 2, "differ_in", what)
    for rank in ended:
        failed, host, closed = rank.reports
        assert failed["kind"] == "MismatchError", ended
        assert failed["seconds"] < 15
        assert "rank 0: all_reduce_multigpu of 2 arrays of float" in failed["text"], ended
        assert host == {"result": [2.0] * 3}, rank  # the group stays usable
        assert closed == {"result": None}, ended


def test_nothing_is_left_behind(tmp_path):
    for rank in run(tmp_path, 2, "start_and_end_three_times"):
        assert rank.code == 0, rank
        assert [one["left"] for one in rank.reports] == [[0, 0, 0, 0, 0]] * 3, rank

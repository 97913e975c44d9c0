"""The operations of all groups of a device are launched in the order of the calls, by one thread at a time."""

import device_jobs
import pytest
from running import program


def run(tmp_path, n, function, **variables):
    return device_jobs.run(tmp_path, program("devices/device_order", function), n, **variables)


@pytest.mark.parametrize("n", [2, 3])
def test_an_operation_does_not_overtake_one_of_another_group(tmp_path, n):
    for ended in run(tmp_path, n, "known_behind_new", FAKE_NCCL_ONE_AT_A_TIME="1"):
        assert ended.reports == [{"result": [n, n * n]}], ended


def test_threads_do_not_launch_at_a_time(tmp_path):
    for ended in run(tmp_path, 2, "threads"):
        assert ended.code == 0, ended
        assert ended.reports == [*[{"result": None}] * 3, {"set_to": "1"}], ended

"""Device memory of the package's own."""

from __future__ import annotations

import device_jobs
import pytest
from running import program


def test_other_threads_run_while_memory_is_freed(tmp_path):
    ended = device_jobs.run(tmp_path, program("devices/device_memory", "free_while_the_device_is_busy"), 1)
    assert [rank.reports for rank in ended] == [[{"ended": True}]], ended


def test_a_consumer_may_drop_an_array_when_python_has_ended(tmp_path):
    program_of_consumer = program("devices/device_memory", "keep_an_array_until_the_process_ends")
    for rank in device_jobs.run(tmp_path, program_of_consumer, 1):
        assert (rank.code, rank.reports) == (0, [{"ended": True}]), rank


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_groups_for_host_arrays_make_nothing_on_the_device(tmp_path, backend):
    for rank in device_jobs.run(tmp_path, program("devices/device_start", "make_groups", backend), 2):
        assert rank.reports[0] == {"for_the_host": [0, 0, 0, 0]}, rank
        assert rank.reports[1]["streams"] > 0, rank

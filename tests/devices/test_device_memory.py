"""Device memory of the package's own."""

from __future__ import annotations

import device_jobs
import pytest
from running import program


def test_other_threads_run_while_memory_is_freed(tmp_path):
    ended = device_jobs.run(tmp_path, program("devices/device_memory", "free_while_the_device_is_busy"), 1)
    assert [rank.reports for rank in ended] == [[{"ended": True}]], ended


def test_other_threads_run_while_a_group_is_freed(tmp_path):
    for rank in device_jobs.run(
        tmp_path, program("devices/device_memory", "drop_a_group_while_the_device_is_busy"), 2
    ):
        assert rank.reports == [{"pinned": [1, 0]}], rank


def test_a_consumer_may_drop_an_array_when_python_has_ended(tmp_path):
    program_of_consumer = program("devices/device_memory", "keep_an_array_until_the_process_ends")
    for rank in device_jobs.run(tmp_path, program_of_consumer, 1):
        assert (rank.code, rank.reports) == (0, [{"ended": True}]), rank


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_groups_for_host_arrays_make_nothing_on_the_device(tmp_path, backend):
    for rank in device_jobs.run(tmp_path, program("devices/device_start", "make_groups", backend), 2):
        assert rank.reports[0] == {"for_the_host": [0, 0, 0, 0]}, rank
        assert rank.reports[1]["streams"] > 0, rank


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_arrays_that_become_longer_take_no_more_blocks_of_device_memory(tmp_path, backend):
    program_of_ranks = program("devices/device_memory", "move_longer_and_longer_arrays", backend)
    for rank in device_jobs.run(tmp_path, program_of_ranks, 2):
        assert rank.reports[0]["blocks"] < 5, rank  # of 20 lengths


def test_what_is_done_again_and_again_pins_nothing_whatever_came_before(tmp_path):
    program_of_ranks = program("devices/device_memory", "reduce_arrays_again_and_again_after_others")
    for rank in device_jobs.run(tmp_path, program_of_ranks, 2):
        assert rank.reports[0]["pinned"] <= 3, rank  # of 10: so many segments are in flight, if not always


def test_no_memory_is_given_back_while_nccl_waits_for_a_rank(tmp_path):
    """That would wait for the device, and so for a rank that waits for this one."""
    for rank in device_jobs.run(tmp_path, program("devices/device_memory", "stage_while_nccl_waits"), 2):
        assert rank.reports == [{"pinned": True}], rank


@pytest.mark.slow
def test_the_length_of_a_segment_depends_on_that_of_the_array(tmp_path):
    """Four equal parts, but of 256 KiB to 4 MiB, so that copies overlap with the work of the host."""
    kib = 1 << 10
    segments = {
        100: 100,
        256: 256,
        508: 508,
        512: 256,
        1024: 256,
        1026: 260,
        3072: 768,
        16388: 3280,
        20480: 4096,
    }
    copy = program("devices/device_memory", "copy_in_segments", [n * kib for n in segments])
    for rank in device_jobs.run(tmp_path, copy, 2):
        assert [found["reduced"] // kib for found in rank.reports] == list(segments.values()), rank
        assert all(
            found["exchanged"] <= longest * kib
            for found, longest in zip(rank.reports, segments.values(), strict=True)
        ), rank

"""Work on device memory is ordered with the streams that make and use it, and no call waits on the host."""

import device_jobs
import pytest
from running import program


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_nothing_is_read_before_it_is_made(tmp_path, backend):
    reduce = program("devices/device_streams", "reduce_late_arrays", backend, 25)
    ended = device_jobs.run(tmp_path, reduce, 2, FAKE_GPU_DELAY_US="1500")
    assert [rank.reports for rank in ended] == [[{"wrong": 0}]] * 2, ended


@pytest.mark.slow  # where it runs beside much else, threads may be late by themselves, which has the effect of a wait
@pytest.mark.parametrize("backend", ["nccl", "native"])
@pytest.mark.parametrize("who", ["library", "user"])
def test_that_is_found_out_if_one_side_does_not_wait(tmp_path, who, backend):
    """The test above can fail: without the waits of the one or the other side it finds wrong numbers."""
    reduce = program("devices/device_streams", "reduce_late_arrays", backend, 5)
    # Much longer than a busy machine needs to wake threads, which may have the same effect as a wait.
    variables = {"FAKE_GPU_DELAY_US": "20000", "FAKE_GPU_IGNORE_WAITS": who}
    ended = device_jobs.run(tmp_path, reduce, 1, **variables)
    assert ended[0].reports[0]["wrong"] > 0, ended


def test_calls_do_not_wait_for_the_device(tmp_path):
    ended = device_jobs.run(tmp_path, program("devices/device_streams", "call_while_the_device_is_busy"), 2)
    expected = [{"ended": False}, {"late": True, "ended": True}, {"result": 2.0**12}]
    assert [rank.reports for rank in ended] == [expected] * 2, ended


def test_an_array_without_a_stream_is_waited_for_on_the_host(tmp_path):
    reduce = program("devices/device_streams", "reduce_without_a_stream")
    ended = device_jobs.run(tmp_path, reduce, 2, FAKE_GPU_DELAY_US="20000")
    assert [rank.reports for rank in ended] == [[{"ended": True, "result": [3.0] * 5}]] * 2, ended


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_the_per_thread_stream_is_that_of_the_caller(tmp_path, backend):
    reduce = program("devices/device_streams", "reduce_in_the_per_thread_stream", backend)
    for rank in device_jobs.run(tmp_path, reduce, 2):
        expected = [{"x": [3.0] * count, "y": [3.0] * count} for count in (3, 3, 5)]
        assert rank.reports == expected, rank


def test_a_consumer_by_dlpack_waits_in_the_stream_that_it_names(tmp_path):
    """None stands for the default stream, -1 for a consumer that needs no order."""
    (rank,) = device_jobs.run(tmp_path, program("devices/device_streams", "hand_a_late_result_on"), 1)
    own, other, default, unordered = rank.reports
    assert own == other == default == {"early": -1.0, "result": 7.0}, rank
    assert unordered == {"early": 3.0, "result": 3.0}, rank


@pytest.mark.parametrize(("hip", "refused"), [(False, [0, -2]), (True, [1, 2, -2])])
def test_numbers_that_are_no_stream_of_dlpack_are_refused(tmp_path, hip, refused):
    export = program(
        "devices/device_streams", "export_for_streams", "hip" if hip else "cuda", [-2, -1, 0, 1, 2]
    )
    (rank,) = device_jobs.run(tmp_path, export, 1, hip=hip)
    assert rank.reports == [{"refused": sorted(refused)}], rank


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_a_work_that_was_waited_for_asks_the_device_nothing_when_it_is_dropped(tmp_path, backend):
    drop = program("devices/device_streams", "drop_what_was_waited_for", backend)
    for rank in device_jobs.run(tmp_path, drop, 2):
        assert rank.reports == [{"dropped": True}], rank


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_what_an_operation_in_progress_writes_is_awaited_in_every_stream(tmp_path, backend):
    use = program("devices/device_streams", "use_what_an_operation_writes_in_another_stream", backend)
    for rank in device_jobs.run(tmp_path, use, 2):
        assert rank.reports == [{"result": [total] * 9} for total in (6.0, 6.0, 3.0, 6.0, 3.0, 3.0)], rank


@pytest.mark.parametrize("verb", ["iallreduce", "ireduce"])
def test_an_average_may_be_waited_for_in_another_stream(tmp_path, verb):
    wait = program("devices/device_streams", "wait_for_an_average_in_another_stream", verb)
    for number, rank in enumerate(device_jobs.run(tmp_path, wait, 2, FAKE_GPU_DELAY_US="3000")):
        expected = 2.0 if verb == "ireduce" and number == 1 else 1.5
        assert rank.reports == [{"result": [expected]}] * 3, rank

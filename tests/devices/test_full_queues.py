"""A full stream, or a busy driver, blocks a thread; deadlines are kept all the same, and other threads go on."""

import device_jobs
import pytest
from running import program


def run(tmp_path, function, *values, **variables):
    return device_jobs.run(tmp_path, program("devices/device_queues", function, *values), 2, **variables)


def run_each(tmp_path, function, values):
    return device_jobs.run_each(
        tmp_path, {value: program("devices/device_queues", function, value) for value in values}, 2
    )


@pytest.mark.slow
@pytest.mark.parametrize(("n_calls", "blocking"), [(2000, "0"), (1, "1")])
def test_calls_behind_a_kernel_whose_peer_never_comes_end_at_the_deadline(tmp_path, n_calls, blocking):
    variables = {"CUDA_LAUNCH_BLOCKING": blocking}
    first, second = run(tmp_path, "call_behind_a_kernel_that_waits_for_a_peer", n_calls, **variables)
    late, others, again = first.reports
    assert late["kind"] == again["kind"] == "TimeoutError", first
    assert "allreduce" in late["text"]
    assert late["seconds"] < 30
    assert others == {"others_ran": True}, first
    assert second.reports[0]["kind"] == "PeerLostError", second


def test_a_full_stream_of_arrays_keeps_nobody_else_from_a_deadline(tmp_path):
    for rank in run(tmp_path, "fill_the_stream_of_the_arrays"):
        late, result = rank.reports
        assert late["kind"] == "TimeoutError", rank
        assert result == {"result": [2.0] * 3, "first": [3.0] * 3}, rank


def test_what_is_received_waits_for_room_in_the_stream(tmp_path):
    _, receiver = run(tmp_path, "receive_more_than_a_stream_takes")
    late, result = receiver.reports
    assert late["kind"] == "TimeoutError", receiver
    assert result == {"right": True}, receiver


def test_other_threads_run_while_the_runtime_answers_a_question(tmp_path):
    ended = run_each(tmp_path, "ask_a_runtime_that_blocks", ("nccl", "native"))
    for rank in (*ended["nccl"], *ended["native"]):
        asked, waited, late, *begun, result = rank.reports
        assert [asked, late, *begun] == [{"others_ran": True}] * 6, rank
        assert waited["kind"] == "TimeoutError", rank
        assert result == {"result": [24.0] * 3}, rank


def test_other_threads_run_while_the_runtime_keeps_a_group_from_ending(tmp_path):
    ended = run_each(tmp_path, "end_a_group_while_the_runtime_blocks", ("abandon", "revoke"))
    for rank in (*ended["abandon"], *ended["revoke"]):
        assert rank.reports == [{"others_ran": True}] * 2, rank


def test_other_threads_run_while_gradients_wait_for_their_stream(tmp_path):
    for rank in run(tmp_path, "add_gradients_of_a_held_stream"):
        assert rank.reports == [{"mean": [1.5] * 3}], rank


@pytest.mark.slow
def test_copies_that_wait_for_their_stream_end_at_the_deadline(tmp_path):
    verbs = ("allreduce_tree", "synchronize", "same", "allreduce_gradients")
    ended = run_each(tmp_path, "copy_leaves_of_a_held_stream", verbs)
    for verb, (first, second) in ended.items():
        late, after = first.reports
        assert late["kind"] == "TimeoutError", first
        assert f"rank 0: {verb}" in late["text"], first
        assert "this rank's device" in late["text"], first
        assert late["seconds"] < 10, first
        # The group has ended, which the other rank need not wait for.
        assert after["kind"] == "TimeoutError", first
        assert second.reports[0]["kind"] == "PeerLostError", (verb, second)
        assert second.reports[0]["seconds"] < 10, (verb, second)


def test_copies_back_of_lists_end_at_the_deadline(tmp_path):
    ended = run_each(
        tmp_path, "store_into_arrays_of_a_held_stream", ("all_gather_multigpu", "broadcast_multigpu")
    )
    for verb, (first, second) in ended.items():
        assert first.reports == [{"result": None}], (verb, first)
        (late,) = second.reports
        assert late["kind"] == "TimeoutError", second
        assert f"rank 1: {verb} of 2 arrays" in late["text"], second
        assert late["seconds"] < 10, second


def test_a_runtime_that_blocks_does_not_keep_other_threads_from_sends(tmp_path):
    for number, rank in enumerate(run(tmp_path, "send_while_the_runtime_blocks")):
        assert rank.reports == [*[{"others_ran": True}] * 3, {"result": [2.0 - number, 7.0, 8.0]}], rank


def test_a_copy_that_waits_for_its_stream_can_be_interrupted(tmp_path):
    (ended,) = device_jobs.run(tmp_path, program("devices/device_queues", "interrupt_a_copy"), 1)
    assert ended.reports == [{"interrupted": True}], ended

"""Errors of the runtime end operations; arrays that cannot be used are refused before anything begins."""

import time

import device_jobs
import pytest
from running import program

BACKENDS = pytest.mark.parametrize("backend", ["nccl", "native"])


def run(tmp_path, function, *values, **variables):
    return device_jobs.run(tmp_path, program("devices/device_errors", function, *values), 2, **variables)


@pytest.mark.parametrize(("code", "text"), [(700, "illegal memory access"), (214, "uncorrectable ECC error")])
@BACKENDS
def test_an_error_that_stays_ends_operations(tmp_path, backend, code, text):
    first, second = run(tmp_path, "fail_for_good", backend, code)
    for one in first.reports:
        assert one.get("kind") == "Error", (first, second)
        assert text in one["text"]
    assert [one["kind"] for one in second.reports] == ["PeerLostError"] * 2, second
    assert text in second.reports[0]["text"], second
    assert second.reports[0]["seconds"] < 20, second
    assert [first.code, second.code] == [0, 0], (first, second)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        pytest.param("return", 0, marks=pytest.mark.slow),
        ("raise", 1),
        pytest.param("close", 0, marks=pytest.mark.slow),
    ],
)
def test_a_process_ends_while_an_abort_of_nccl_waits_for_the_device(tmp_path, ending, code):
    ended = run(tmp_path, "end_while_an_abort_waits_for_the_device", ending, FAKE_NCCL_FAIL="0:1:error")
    now = time.monotonic()
    for rank in ended:
        failed, state, *closed, last = rank.reports
        assert failed["kind"] in ("Error", "PeerLostError"), ended
        assert state == {"blocked": True}, ended
        assert [one["kind"] for one in closed] == ["TimeoutError"] * (ending == "close"), ended
        assert rank.code == code, ended
        assert now - last["time"] < 20, ended


@BACKENDS
def test_a_process_ends_while_an_operation_waits_for_the_device(tmp_path, backend):
    ended = run(tmp_path, "end_while_an_operation_waits_for_the_device", backend)
    now = time.monotonic()
    for rank in ended:
        assert rank.code == 0, ended
        assert rank.reports[0]["done"] is False, ended
        assert now - rank.reports[0]["time"] < 20, ended


@BACKENDS
def test_after_its_end_an_operation_needs_no_stream(tmp_path, backend):
    for one in run(tmp_path, "wait_once_the_stream_has_gone", backend):
        ended, failed = one.reports
        assert ended == {"result": True}, one
        assert failed["kind"] == "MismatchError", one


def test_the_array_of_a_mismatch_is_dropped_once_the_device_has_ended(tmp_path):
    first, second = run(tmp_path, "drop_the_array_of_a_mismatch", "nccl")
    for rank in (first, second):
        assert len(rank.reports) == 2, rank
        assert rank.reports[0]["kind"] == "MismatchError", rank
        assert not rank.reports[1]["kept"], rank
    assert first.reports[1]["held"], first


@BACKENDS
def test_no_error_is_left_for_the_next_check_of_the_user(tmp_path, backend):
    for rank in run(tmp_path, "leave_no_error_behind", backend):
        refused, last = rank.reports
        assert refused["kind"] == "InvalidArgumentError"
        assert last == {"last": 0}, rank


@BACKENDS
def test_arrays_that_cannot_be_used_are_refused_before_anything_begins(tmp_path, backend):
    ended = run(tmp_path, "give_unusable_arrays", backend)
    expected = [
        "the array is on device 3, but rank {0} of group 'world' uses device {0}",
        "does not know its address",
        "one array is in host memory and the other in device memory",
        "one array is in host memory and the other in device memory",
        "elements of type '<V8' in __cuda_array_interface__ cannot be sent",
        "the array is on device 3, but rank {0} of group 'world' uses device {0}",
    ]
    for number, rank in enumerate(ended):
        *refused, result = rank.reports
        assert [one["kind"] for one in refused] == ["InvalidArgumentError"] * 6, rank
        for one, text in zip(refused, expected, strict=True):
            assert text.format(number) in one["text"]
        assert result == {"result": [3.0] * 7}, ended


ELSEWHERE = "the array is on device 3, but rank "
FREED = "does not know its address"


@BACKENDS
def test_leaves_that_cannot_be_used_are_refused_before_ranks_compare_trees(tmp_path, backend):
    ended = run(tmp_path, "give_unusable_leaves", backend)
    for rank in ended:
        *refused, result = rank.reports
        assert [one["kind"] for one in refused] == ["InvalidArgumentError"] * 5, rank
        for one, text in zip(refused, [ELSEWHERE, ELSEWHERE, FREED, FREED, FREED], strict=True):
            assert f"leaf ['b']: {'the array is' if text is ELSEWHERE else 'the array says'}" in one["text"]
            assert text in one["text"]
        assert result == {"result": [6.0] * 7, "tree": [True, [20.0] * 7]}, ended


@BACKENDS
def test_arrays_that_cannot_be_used_are_refused_before_ranks_exchange_lengths(tmp_path, backend):
    first, second = run(tmp_path, "exchange_lengths_with_unusable_arrays", backend)
    for number, rank in enumerate((first, second)):
        *refused, last, result = rank.reports
        captures = [refused.pop(7) for _ in range(2)] if backend == "native" else []
        assert [one["kind"] for one in refused] == ["InvalidArgumentError"] * 7, rank
        assert all(ELSEWHERE in one["text"] for one in refused[:3]), rank
        assert all(FREED in one["text"] for one in refused[3:6]), rank
        assert "one array is in host memory and the other in device memory" in refused[6]["text"]
        numbers = [1.0] * 7 + [2.0] * 7
        assert result == {"result": numbers, "row": [float(i + 7 * number) for i in range(7)]}, rank
        heard = "" if number == 0 else "root rank 0 cannot send: "
        assert f"{heard}the array is on device 3" in last["text"], rank
        if captures:
            captured, of_root = captures
            assert captured["kind"] == "UnavailableError", rank
            assert f"{heard}the array's stream is being captured" in of_root["text"], rank
            assert of_root["kind"] == ("InvalidArgumentError" if number else "UnavailableError"), rank


def test_pinned_memory_that_other_processes_cannot_read_is_copied(tmp_path):
    """Where shared memory cannot be registered, so that operations stage in memory of the runtime."""
    variables = {"FAKE_GPU_SECRET_PINNED": "1", "FAKE_GPU_NO_REGISTER": "1"}
    ended = run(tmp_path, "exchange_through_secret_pinned_memory", **variables)
    assert [rank.code for rank in ended] == [0, 0], ended
    if "skip" in ended[0].reports[0]:
        pytest.skip(ended[0].reports[0]["skip"])
    for number, rank in enumerate(ended):
        moved = 30_000.0 * 2 * (number + 1)
        exchanged, memory = rank.reports
        assert exchanged == {"result": 90_000.0, "moved": moved}, rank
        assert memory == {"hidden": True, "registered": False, "pinned": True}, rank

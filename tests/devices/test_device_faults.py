"""Ranks that fail, hang, die or disagree while devices work: every other rank gets an exception in time."""

import device_jobs
import pytest
from running import program


def run(tmp_path, n, function, *values, **variables):
    return device_jobs.run(tmp_path, program("devices/device_faults", function, *values), n, **variables)


def test_a_rank_whose_operation_fails(tmp_path):
    ended = run(tmp_path, 3, "reduce_often", 20.0, FAKE_NCCL_FAIL="1:5:error")
    for rank in ended:
        assert rank.code == 0, ended
        started, failed, again, host = rank.reports
        assert "kind" not in started
        assert failed["kind"] in ("Error", "PeerLostError"), ended
        assert failed["seconds"] < 15
        assert again["kind"] == failed["kind"]
        assert host["kind"] in ("Error", "PeerLostError"), ended
    assert "injected error" in ended[1].reports[1]["text"]
    assert "injected error" in ended[0].reports[1]["text"], ended


def test_a_rank_that_dies_while_devices_work(tmp_path):
    ended = run(tmp_path, 3, "reduce_often", 20.0, FAKE_NCCL_FAIL="2:5:die")
    assert ended[2].code == -9
    for rank in ended[:2]:
        assert rank.code == 0, ended
        failed = rank.reports[1]
        assert failed["kind"] == "PeerLostError", ended
        assert "rank 2" in failed["text"]
        assert failed["seconds"] < 15


def test_a_rank_whose_operation_hangs(tmp_path):
    ended = run(tmp_path, 2, "reduce_often", 3.0, FAKE_NCCL_FAIL="0:5:hang")
    kinds = []
    for rank in ended:
        assert rank.code == 0, ended
        kinds.append(rank.reports[1]["kind"])
        assert rank.reports[1]["seconds"] < 30
        assert "allreduce" in rank.reports[1]["text"], ended
    assert "TimeoutError" in kinds
    assert set(kinds) <= {"TimeoutError", "PeerLostError"}


def test_a_rank_that_does_not_come(tmp_path):
    ended = run(tmp_path, 2, "reduce_often", 3.0, False, True)
    failed = ended[0].reports[1]
    assert failed["kind"] == "TimeoutError", ended
    assert "not all ranks have reached it" in failed["text"]
    assert ended[1].reports[2]["kind"] == "PeerLostError", ended


@pytest.mark.parametrize("what", ["error", "die", "hang"])
def test_a_rank_that_fails_while_nccl_starts(tmp_path, what):
    ended = run(tmp_path, 3, "initialize", 5.0, FAKE_NCCL_FAIL=f"1:init:{what}")
    for number, rank in enumerate(ended):
        if what == "die" and number == 1:
            assert rank.code == -9
            continue
        assert rank.code == 0, ended
        failed = rank.reports[0]
        assert (
            failed["kind"]
            in {
                "error": ("Error", "PeerLostError"),
                "die": ("PeerLostError",),
                "hang": ("TimeoutError", "PeerLostError"),
            }[what]
        ), ended
        assert failed["seconds"] < 30


def test_ranks_that_were_given_different_terms(tmp_path):
    ended = run(tmp_path, 3, "initialize", 20.0, of_rank={1: {"SAMESTEP_STAGING_BYTES": "4096"}})
    for rank in ended:
        assert rank.reports[0]["kind"] == "MismatchError", ended
        assert rank.reports[0]["text"].endswith(" on ranks 0, 2, 4096 on rank 1"), ended


@pytest.mark.parametrize("mismatch", ["", "hang"])
def test_ranks_that_do_not_agree(tmp_path, mismatch):
    for rank in run(tmp_path, 2, "reduce_often", 20.0, True, FAKE_NCCL_MISMATCH=mismatch):
        _, failed, again, host = rank.reports
        assert failed["kind"] == "MismatchError", rank
        assert "op sum" in failed["text"]
        assert "op max" in failed["text"]
        assert again["kind"] == "MismatchError"
        assert host == {"result": [2.0] * 3}, rank  # the host part of the group stays usable


def test_a_device_that_is_lost_ends_the_group_and_not_the_process(tmp_path):
    for rank in run(tmp_path, 2, "lose_a_device"):
        assert rank.code == 0, rank
        for one in rank.reports:
            assert "failed: invalid device ordinal" in one["text"], rank


def test_wrong_arguments_change_nothing(tmp_path):
    for number, rank in enumerate(run(tmp_path, 2, "give_wrong_arguments")):
        assert [one["kind"] for one in rank.reports[:3]] == ["InvalidArgumentError"] * 3, rank
        assert f"device 3, but rank {number}" in rank.reports[2]["text"]
        assert rank.reports[3] == {"result": [3.0] * 7}, rank


def test_nothing_is_left_behind(tmp_path):
    for rank in run(tmp_path, 2, "start_and_end_three_times"):
        assert rank.code == 0, rank
        assert [one["left"] for one in rank.reports] == [[0, 0, 0, 0]] * 3, rank


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_arrays_of_an_exchange_that_overlap_are_refused_before_it_starts(tmp_path, backend):
    ended = run(tmp_path, 2, "exchange_overlapping_arrays", backend)
    for number, rank in enumerate(ended):
        refused, exchanged = rank.reports
        assert refused["kind"] == "InvalidArgumentError", ended
        assert refused["text"] == "sendrecv: x and out overlap in device memory; pass a copy of x"
        assert exchanged == {"result": [float(1 - number)] * 3}, ended


@pytest.mark.parametrize("backend", ["nccl", "native"])
@pytest.mark.parametrize("connects", [False, True], ids=["first", "later"])
def test_a_call_may_wait_longer_than_the_timeout_of_the_group(tmp_path, backend, connects):
    for rank in run(tmp_path, 2, "wait_longer_than_the_group", backend, connects):
        assert rank.reports == [{"result": [3.0] * 7}], rank


@pytest.mark.parametrize("backend", ["nccl", "native"])
@pytest.mark.parametrize("drops", [True, False], ids=["drops", "exits"])
def test_a_forked_process_ends_at_once_and_its_parent_goes_on(tmp_path, backend, drops):
    for rank in run(tmp_path, 2, "fork_a_process", backend, drops):
        assert rank.reports == [{"status": 0}, {"result": [3.0] * 7}], rank

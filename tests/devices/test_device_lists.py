"""Several devices on each rank: lists of arrays go through a clique of NCCL with a member for each device."""

import device_jobs
import pytest
from running import program

# Rank r has devices 2 r and 2 r + 1, of which neither need be the one it was started with.
SETTINGS = {"FAKE_GPU_DEVICES": "8", "FAKE_GPU_DELAY_US": "300"}


def run(tmp_path, n, function, *values, **variables):
    settings = SETTINGS | variables
    return device_jobs.run(tmp_path, program("devices/device_lists", function, *values), n, **settings)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(
    "how",
    [{}, {"FAKE_NCCL_IN_PROGRESS": "1"}],
    ids=["", "late"],
)
def test_the_verbs_go_through_nccl(tmp_path, n, how):
    ended = run(tmp_path, n, "use_each_operation", **how)
    for rank in ended:
        assert rank.code == 0, ended
        assert [one["calls"] for one in rank.reports if "calls" in one] == [2] * 8, ended
        assert all(one["ok"] for one in rank.reports if "ok" in one), ended


def test_the_functions_of_2019_do_too(tmp_path):
    ended = run(tmp_path, 2, "use_samestep_distributed")
    for rank in ended:
        assert rank.code == 0, ended
        assert [one["calls"] for one in rank.reports if "calls" in one] == [2, 2, 2, 8], ended
        assert all(one["ok"] for one in rank.reports if "ok" in one), ended


def test_what_nccl_does_not_take_goes_through_the_host(tmp_path):
    ended = run(tmp_path, 2, "call_what_nccl_does_not_take")
    for rank in ended:
        assert rank.code == 0, ended
        assert [one["calls"] for one in rank.reports if "calls" in one] == [0] * 8 + [2], ended
        assert all(one["ok"] for one in rank.reports if "ok" in one), ended


def test_groups_and_orders_of_devices_have_cliques_of_their_own(tmp_path):
    for rank in run(tmp_path, 3, "use_groups_and_orders"):
        assert rank.code == 0, rank
        assert all(one["ok"] for one in rank.reports if "ok" in one), rank
        assert {"calls": 1} in rank.reports


def test_nothing_is_read_before_it_is_made(tmp_path):
    ended = run(tmp_path, 2, "reduce_late_arrays", FAKE_GPU_DELAY_US="1500")
    assert [rank.reports for rank in ended] == [[{"wrong": 0}]] * 2, ended


@pytest.mark.parametrize("who", ["library", "user"])
def test_that_is_found_out_if_one_side_does_not_wait(tmp_path, who):
    settings = {"FAKE_GPU_DELAY_US": "1500", "FAKE_GPU_IGNORE_WAITS": who}
    if who == "user":
        settings["FAKE_NCCL_SLOW"] = "0"  # a result that nobody waits for is not there yet
    ended = run(tmp_path, 1, "reduce_late_arrays", **settings)
    assert ended[0].reports[0]["wrong"] > 0, ended


def test_nobody_waits_on_the_host_after_the_first_use(tmp_path):
    ended = run(tmp_path, 2, "call_while_the_devices_are_busy")
    assert [rank.reports for rank in ended] == [[{"ended": False}, {"late": True}]] * 2, ended


def test_a_default_stream_is_that_of_the_array_s_device(tmp_path):
    ended = run(tmp_path, 2, "use_default_streams", FAKE_GPU_DELAY_US="1500")
    assert [rank.reports for rank in ended] == [[{"wrong": 0}]] * 2, ended


# ---- errors


DIFFERENT = ("lengths", "orders", "memories", "counts", "dtypes", "operators", "operators on one device")


@pytest.mark.parametrize("used_before", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_told_on_all_of_them(tmp_path, what, used_before):
    ended = run(tmp_path, 2, "differ_in", what, used_before)
    for rank in ended:
        failed, host, after, closed = rank.reports
        assert host == {"result": [2.0] * 3}, rank  # the host part of the group stays usable
        if not used_before and what in ("orders", "memories"):  # a clique exists for it, or the host does it
            assert failed == after == closed == {"result": None}, ended
            continue
        # NCCL stays usable for all of them, or for none.
        assert after.get("kind") == ended[0].reports[2].get("kind"), ended
        assert after.get("kind") == "MismatchError" or not used_before, ended
        assert closed == {"result": None}, ended
        assert after.get("seconds", 0) < 15
        assert failed["kind"] == "MismatchError", ended
        assert failed["seconds"] < 15
        text = "rank 0: allreduce_multi of 2 arrays of float"
        assert text in failed["text"], ended


@pytest.mark.parametrize("member", [2, 3])
def test_a_rank_that_dies_while_devices_work(tmp_path, member):
    """Members 2 and 3 are the devices of rank 1."""
    ended = run(tmp_path, 3, "reduce_often", 20.0, FAKE_NCCL_FAIL=f"{member}:3:die")
    assert ended[1].code == -9
    for rank in (ended[0], ended[2]):
        assert rank.code == 0, ended
        _, failed, again, single = rank.reports
        assert failed["kind"] == again["kind"] == single["kind"] == "PeerLostError", ended
        assert "rank 1" in failed["text"]
        assert failed["seconds"] < 15


@pytest.mark.parametrize("member", [2, 3])
def test_a_member_whose_operation_fails(tmp_path, member):
    ended = run(tmp_path, 2, "reduce_often", 20.0, FAKE_NCCL_FAIL=f"{member}:3:error")
    for rank in ended:
        assert rank.code == 0, ended
        assert rank.reports[1]["kind"] in ("Error", "PeerLostError"), ended
        assert "injected error" in rank.reports[1]["text"], ended
        assert rank.reports[1]["seconds"] < 15


def test_a_member_that_hangs(tmp_path):
    ended = run(tmp_path, 2, "reduce_often", 3.0, FAKE_NCCL_FAIL="1:3:hang")
    kinds = [rank.reports[1]["kind"] for rank in ended]
    assert "TimeoutError" in kinds, ended
    assert set(kinds) <= {"TimeoutError", "PeerLostError"}
    assert all(rank.reports[1]["seconds"] < 30 and rank.code == 0 for rank in ended)


@pytest.mark.parametrize("what", ["error", "die", "hang"])
def test_a_member_that_fails_while_the_clique_starts(tmp_path, what):
    # The group's own communicator has no member 3.
    ended = run(tmp_path, 2, "reduce_often", 5.0, FAKE_NCCL_FAIL=f"3:init:{what}")
    for number, rank in enumerate(ended):
        if what == "die" and number == 1:
            assert rank.code == -9
            continue
        assert rank.code == 0, ended
        expected = {"error": ("Error", "PeerLostError"), "die": ("PeerLostError",)}
        assert rank.reports[1]["kind"] in expected.get(what, ("TimeoutError", "PeerLostError")), ended
        assert rank.reports[1]["seconds"] < 30


def test_nothing_is_left_behind(tmp_path):
    for rank in run(tmp_path, 2, "start_and_end_three_times"):
        assert rank.code == 0, rank
        assert [one["left"] for one in rank.reports] == [[0, 0, 0, 0, 0]] * 3, rank


def test_calls_of_several_members_outside_a_group_are_refused(tmp_path):
    """What NCCL may wait for without end, the stand-in refuses; the package makes no such call."""
    (rank,) = run(tmp_path, 1, "call_members_outside_a_group")
    assert rank.code == 0, rank
    made = [{"separate": [7, 5]}, {"together": [0, 0, 7]}]
    assert rank.reports == [
        *made,
        {"alone": 5},
        {"ended": [5, 5], "left": 2},
        {"ended": [0, 0, 0], "left": 0},
    ], rank

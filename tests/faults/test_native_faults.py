"""Ranks that die, stop, or come and go, without a launcher that ends the others: through shared memory and over TCP."""

import os
import signal

import pytest
from native_ranks import FOUND_S, PATIENCE_S
from running import program

CALLS = (
    "a small allreduce",
    "an allreduce by CMA",
    "a staged allreduce",
    "an allreduce in shared memory",
    "a broadcast",
    "a receive",
    "a barrier",
)


@pytest.mark.parametrize("call", CALLS)
def test_a_killed_rank_is_named_by_all_others(ranks, call):
    job = ranks(program("faults/native_faults", "lose_rank_1_in", call), 3)
    killed_at = job.kill(1)
    for rank in (0, 2):
        found = job.report(rank)
        assert "rank 1 has left group 'world'" in found["text"]
        assert found["ranks"] == [1]
        assert found["at"] - killed_at < FOUND_S
        assert job.report(rank) == {"ended": True}
        assert job.processes[rank].wait(PATIENCE_S) == 0


@pytest.mark.parametrize("ranks", ["shm", "tcp"], indirect=True)
def test_a_forked_child_does_not_hide_a_death_in_another_pid_namespace(ranks):
    job = ranks(program("faults/native_faults", "die_beside_a_forked_child"), 2)
    for rank in range(2):
        if missing := job.report(rank)["missing"]:
            pytest.skip(missing)
    found = job.report(0)
    assert "rank 1 has left group 'world'" in found["text"]
    assert found["seconds"] < FOUND_S


def test_survivors_may_start_anew(ranks):
    job = ranks(program("faults/native_faults", "start_again_without_rank_2"), 3)
    for rank in range(2):
        assert job.report(rank) == {"total": 3.0, "size": 2}
        assert job.processes[rank].wait(PATIENCE_S) == 0


def test_a_stopped_rank_is_named_at_the_deadline(ranks):
    job = ranks(program("faults/native_faults", "wait_for_a_stopped_rank"), 2)
    pids = job.pids()
    os.kill(pids[1], signal.SIGSTOP)
    found = job.report(0)
    assert "for rank 1" in found["text"]
    assert found["ranks"] == [1]
    assert 0.3 <= found["seconds"] < FOUND_S


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "n_worlds"), [("shm", 1000), ("tcp", 250)], indirect=["ranks"])
def test_many_worlds_leave_nothing_behind(ranks, tmp_path, n_worlds):
    job = ranks(program("faults/native_faults", "open_many_worlds", n_worlds), 2)
    for rank in range(2):
        found = job.report(rank)
        first, *others = found["seen"]
        assert others == [first] * len(others)
        assert first[1] == 0
        assert found["grown_kb"] < 4096  # a world left behind holds more than 2 MB
        assert job.processes[rank].wait(PATIENCE_S) == 0
    assert not [name for name in os.listdir("/dev/shm") if "samestep" in name]
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_rank_killed_at_any_moment_is_named_by_all_others(ranks):
    n_trials = 20
    job = ranks(program("faults/native_faults", "kill_at_random_moments", n_trials), 1)
    for seed in range(n_trials):
        survivors = [job.report(0) for _ in range(2)]
        trial = job.report(0)
        victim = trial["victim"]
        assert trial["ends"] == [-signal.SIGKILL if rank == victim else 0 for rank in range(3)], trial
        assert {found["rank"] for found in survivors} == {0, 1, 2} - {victim}
        for found in survivors:
            assert found["seed"] == seed
            assert f"rank {victim} has left group 'world'" in found["text"]
            assert found["at"] - trial["killed_at"] < FOUND_S

"""Ranks that wait for one that is lost, missing, or waits itself: class and text of the error, and when it comes."""

import os
import re
import signal

import pytest
from native_ranks import FOUND_S, PATIENCE_S
from running import program

everywhere = pytest.mark.parametrize("ranks", ["shm", "tcp", "hierarchical"], indirect=True)


@everywhere
def test_a_receive_from_any_rank_ends_once_one_is_lost(ranks):
    job = ranks(program("faults/waiting", "receive_from_any_while_rank_1_dies"), 3)
    killed_at = job.kill(1)
    for rank in (0, 2):
        found = job.report(rank)
        assert re.search(r"rank 1( \(\S+\))? has left group 'world'", found["text"])
        assert found["at"] - killed_at < FOUND_S
        if rank == 2:
            assert (
                "could still have arrived from rank 0" in found["text"] or "has left since" in found["text"]
            )
            assert "rank 2" not in found["text"]


def test_a_receive_from_any_rank_outlives_ranks_that_have_finished(ranks):
    job = ranks(program("faults/waiting", "receive_from_any_while_ranks_finish"), 3)
    found = job.report(0)
    assert found["found"] == [1.0, 2.0]
    assert re.match(r"rank 2\b", found["late"])


@everywhere
def test_all_who_wait_for_a_missing_rank_time_out_naming_it(ranks):
    job = ranks(program("faults/waiting", "reduce_without_rank_2"), 4)
    for rank in (0, 1, 3):
        found = job.report(rank)
        assert found["kind"] == "TimeoutError", found
        assert re.search(r"for rank 2\b", found["text"]), found


@everywhere
def test_a_survivor_that_lives_on_lets_others_go(ranks):
    job = ranks(program("faults/waiting", "wait_for_each_other_while_rank_3_dies"), 4)
    killed_at = job.kill(3)
    texts = []
    for rank in range(3):
        found = job.report(rank)
        assert found["at"] - killed_at < FOUND_S
        texts.append(found["text"])
    for text in texts:
        assert text.count("has left group") == 1  # one cause
        assert len(text) < 300
    assert re.search(r"rank 3( \(\S+\))? has left group 'world'", texts[0])
    assert re.search(r"rank 3( \(\S+\))? has left group 'world'", texts[1])
    # Which has other numbers in the group.
    assert re.search(r"rank 1 \(rank 0 of the world.*\) has left group", texts[2])
    assert "because of rank 3 of the world" in texts[2]


def test_a_text_names_one_cause_and_counts_those_who_followed(ranks):
    job = ranks(program("faults/waiting", "join_after_the_others_have_left"), 6)
    pids = job.pids()
    os.kill(pids[5], signal.SIGKILL)
    for rank in range(1, 5):
        job.processes[rank].wait(PATIENCE_S)
    os.kill(pids[0], signal.SIGUSR1)
    text = job.processes[0].stdout.read().strip().splitlines()[-1]
    assert "PeerLostError" in text
    assert "rank 5 has left group 'world'" in text
    assert "4 other ranks have left since" in text
    assert len(text) < 300, text

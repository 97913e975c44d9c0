"""What a filter of the kernel, or the kind of memory, forbids ranks of one host: they do without, and are right."""

import contextlib
import os
import platform

import pytest
from native_ranks import FOUND_S
from running import program

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="numbers of calls")

CHANGES = {
    "calls that are forbidden later": "calls",
    "a process that is not dumpable": "dumpable",
    "memory that the kernel cannot read": "secret",
}


@pytest.mark.parametrize("ranks", ["shm", "hierarchical"], indirect=True)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_memory_that_is_closed_after_the_start_goes_through_shared_memory(ranks, change):
    job = ranks(program("faults/forbidden_calls", "close_memory_after_the_start", change), 3)
    if "skip" in (found := job.report(1)):
        pytest.skip(found["skip"])
    assert found == {"right": True}
    assert [job.report(rank) for rank in (0, 2)] == [{"right": True}] * 2


@pytest.mark.parametrize("ranks", ["shm"], indirect=True)
def test_a_death_is_found_without_pidfd(ranks):
    job = ranks(program("faults/forbidden_calls", "lose_rank_1_without_pidfd"), 3)
    killed_at = job.kill(1)
    for rank in (0, 2):
        found = job.report(rank)
        assert "rank 1 has left group 'world': its process has ended" in found["text"]
        assert found["at"] - killed_at < FOUND_S


@pytest.mark.parametrize("ranks", ["shm"], indirect=True)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("how", "why"),
    [("forbidden", "memfd_create: Operation not permitted"), ("limited", "`ulimit -f` counts it")],
)
def test_all_ranks_learn_that_one_can_share_no_memory_and_what_does_without(ranks, how, why, later):
    job = ranks(program("faults/forbidden_calls", "share_no_memory", how, later), 3)
    texts = {job.report(rank)["text"] for rank in range(3)}
    assert len(texts) == 1
    text = texts.pop()
    assert "rank 0 of this host cannot make the memory that its ranks share" in text and why in text
    assert "SAMESTEP_NATIVE_TRANSPORT=tcp" in text


def test_no_connection_gets_the_number_of_a_closed_standard_descriptor(ranks):
    job = ranks(program("faults/forbidden_calls", "close_standard_descriptors"), 2)
    assert [job.report(rank) for rank in range(2)] == [{"files": ["/dev/null"] * 3}] * 2


@pytest.mark.parametrize("ranks", ["shm"], indirect=True)
def test_doctor_says_what_is_forbidden_and_what_is_done_instead(ranks):
    before, after = ranks(program("faults/forbidden_calls", "tell_what_is_forbidden"), 1).report(0)["notes"]
    assert len(after) == 2
    assert after[0] == "no process_vm_readv: long arrays are copied through shared memory"
    assert after[1] == "no pidfd_open: whether other ranks live is looked up in /proc"
    assert set(before) <= set(after)
    with contextlib.suppress(OSError):  # this machine forbids it, too
        os.close(os.pidfd_open(os.getpid()))
        assert after[1] not in before

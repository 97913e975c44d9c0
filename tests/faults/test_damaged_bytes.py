"""Bytes that change on the way between two ranks are an error of all ranks, never a wrong number or a wait."""

import pytest
from native_ranks import PATIENCE_S
from running import program

# In the first frame of 8 elements byte 10 is one of the header and byte 50 one of the body; of 300,000 elements byte
# 1,000,000 is in the middle.
CASES = [
    ("allreduce", 8, 10),
    ("allreduce", 8, 50),
    ("allreduce", 300_000, 1_000_000),
    ("bcast", 300_000, 1_000_000),
    ("gather", 300_000, 1_000_000),
    ("objects", 8, 150),
    ("from_anybody", 8, 50),
    ("from_anybody", 300_000, 1_000_000),
]


@pytest.fixture(params=["0", "1"], ids=["plain", "encrypted"])
def encryption(request, monkeypatch):
    monkeypatch.setenv("SAMESTEP_ENCRYPT", request.param)
    return request.param == "1"


@pytest.mark.usefixtures("encryption")
@pytest.mark.parametrize(("call", "n", "at"), CASES)
@pytest.mark.parametrize("ranks", ["tcp"], indirect=True)
def test_a_flipped_bit_is_an_error_that_names_both_ranks(ranks, call, n, at):
    check(ranks(program("faults/damaged_bytes", "repeat_until_a_bit_flips", call, n, at, [0, 1]), 3), [0, 1])


@pytest.mark.usefixtures("encryption")
@pytest.mark.parametrize(("n", "at"), [(8, 10), (300_000, 1_000_000)])
@pytest.mark.parametrize("ranks", ["hierarchical"], indirect=True)
def test_between_hosts_too(ranks, n, at):
    job = ranks(program("faults/damaged_bytes", "repeat_until_a_bit_flips", "allreduce", n, at, [0, 2]), 4)
    check(job, [0, 2])


def check(job, between):
    found = [job.report(rank) for rank in range(len(job.processes))]
    assert [each["wrong"] for each in found] == [0] * len(found)
    for rank in between:
        text = found[rank]["text"]
        assert text.startswith("PeerLostError"), text
        assert all(f"rank {each}" in text for each in between), text
        assert "were changed on the way" in text
    assert all("Error" in each["text"] for each in found)


@pytest.mark.parametrize("ranks", ["tcp"], indirect=True)
def test_an_encrypted_text_is_not_on_the_wire(ranks, encryption):
    job = ranks(program("faults/damaged_bytes", "send_a_text"), 2)
    assert job.report(1)["seen"] is not encryption
    for rank in range(2):
        assert job.processes[rank].wait(PATIENCE_S) == 0


@pytest.mark.parametrize("ranks", ["tcp", "hierarchical"], indirect=True)
def test_encrypted_results_are_right(ranks, encryption):
    job = ranks(program("faults/damaged_bytes", "use_each_call"), 3)
    assert [job.report(rank)["wrong"] for rank in range(3)] == [0, 0, 0]
    for rank in range(3):
        assert job.processes[rank].wait(PATIENCE_S) == 0


@pytest.mark.parametrize("ranks", ["tcp"], indirect=True)
def test_without_the_library_all_ranks_get_an_error(ranks, monkeypatch):
    monkeypatch.setenv("SAMESTEP_ENCRYPT", "1")
    job = ranks(program("faults/damaged_bytes", "start_without_libcrypto_on_rank_1"), 3)
    for rank in range(3):
        assert job.report(rank)["text"] == (
            "UnavailableError: SAMESTEP_ENCRYPT=1: rank 1 cannot encrypt: no library"
        )

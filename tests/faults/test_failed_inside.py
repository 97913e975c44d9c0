"""A call that fails inside on one rank, which lacks memory or descriptors: all others learn which rank that is."""

import json
import re

import jobs
import pytest
from native_ranks import FOUND_S
from running import program


@pytest.mark.parametrize(
    ("ranks", "n", "of", "verb", "why"),
    [
        ("shm", 3, "memory", "allreduce", "no memory is left"),
        ("tcp", 3, "memory", "allreduce", "no memory is left"),
        ("tcp", 3, "memory", "bcast", "no memory is left"),
        ("hierarchical", 4, "memory", "allreduce", "no memory is left"),
        ("shm", 3, "descriptors", "allreduce of shared arrays", "raise `ulimit -n`"),
    ],
    indirect=["ranks"],
)
def test_a_rank_whose_collective_fails_tells_the_others(ranks, n, of, verb, why):
    job = ranks(program("faults/failed_inside", "run_out", of, verb), n)
    for rank in range(n):
        found = job.report(rank)
        if rank == 1:
            assert found["kind"] == {"memory": "MemoryError", "descriptors": "UnavailableError"}[of]
            assert why in found["next"]
            continue
        assert found["kind"] == "PeerLostError"
        assert found["ranks"] == [1]
        assert bool(found["hosts"]) == (n == 4)  # on two levels
        assert re.search(r"rank 1( \(\S+\))? has left group 'world'", found["text"]), found["text"]
        # A reset connection may lose the reason, which had been sent before.
        assert why in found["text"] or "Connection reset by peer" in found["text"]
        assert found["seconds"] < FOUND_S


@pytest.mark.parametrize("verb", ["split", "group"])
@pytest.mark.parametrize("of", ["memory", "descriptors"])
@pytest.mark.parametrize(("ranks", "n"), [("shm", 3), ("hierarchical", 4)], indirect=["ranks"])
def test_a_group_that_one_rank_cannot_make_is_made_by_none(ranks, n, of, verb):
    job = ranks(program("faults/failed_inside", "run_out", of, verb), n)
    texts = set()
    for rank in range(n):
        found = job.report(rank)
        assert found["kind"] == "UnavailableError"
        assert found["seconds"] < FOUND_S
        assert "next" not in found  # a barrier of the parent group
        texts.add(found["text"])
    assert len(texts) == 1
    (text,) = texts
    assert text.startswith(verb)
    assert re.search(r"cannot be made by rank 1( \(\S+\))?: ", text), text
    # Shared memory, or any other, whichever runs out first.
    cures = {"descriptors": "raise `ulimit -n`", "memory": "does without such memory|`ulimit -v`"}
    assert re.search(cures[of], text), text


@pytest.mark.slow
def test_a_rank_whose_collective_fails_tells_the_others_over_mpi():
    n = 3
    ended = jobs.run(
        n, [*program("faults/failed_inside", "run_out", "memory", "allreduce")], SAMESTEP_MPI_TRANSPORT="mpi"
    )
    found = {each["rank"]: each for each in map(json.loads, re.findall(r"<(\{.*?\})>", ended.text))}
    assert sorted(found) == list(range(n)), ended.text
    assert found[1]["kind"] == "MemoryError"
    for rank in (0, 2):
        assert found[rank]["kind"] == "PeerLostError"
        assert "rank 1 has left group 'world'" in found[rank]["text"]
        assert found[rank]["seconds"] < FOUND_S

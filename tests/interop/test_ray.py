"""Ranks on Ray: actors of `ray.util.collective`, and workers of Ray Train. On a real Ray of this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
PROGRAM = Path(__file__).parent / "programs" / "ray_job.py"


def run(*cases):
    done = subprocess.run(
        [sys.executable, PROGRAM, *cases], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_actors_call_collectives_on_arrays_of_both_libraries():
    pytest.importorskip("torch")
    found = run("numpy", "torch", "two_groups", "read_only")
    assert found["numpy"] == found["torch"]
    for rank, of_rank in enumerate(found["numpy"]):
        assert of_rank == {
            "allreduce": [3.0, 6.0, 9.0, 12.0, 15.0],
            "maximum": [2, 3, 4, 5, 6],
            "broadcast": 2.0,
            "reduce": [7, 7] if rank == 1 else [1 << rank] * 2,  # elsewhere as it was
            "allgather": [[0, 0], [1, 1], [2, 2]],
            "reducescatter": [30.0 * rank],
            "message": [0 if rank == 2 else rank] * 3,
        }
    # Ranks 1 and 2 add in their own group, then with rank 0.
    assert found["two_groups"] == [6.0, 6.0]
    assert found["read_only"].startswith("InvalidArgumentError: allreduce: the array is read-only")


@pytest.mark.slow
def test_an_actor_that_is_killed_is_named():
    first, died, last = run("killed")["killed"]
    assert died == "died"
    for text in (first, last):  # one may add that the other has left since
        assert text.startswith("PeerLostError: allreduce of float64[9]") and "rank 1" in text
        assert "has ended" in text


@pytest.mark.slow
def test_workers_of_a_trainer_are_ranks():
    pytest.importorskip("torch")
    found = run("trained", "trained_with_torch", "trained_after_a_failure")
    assert found["trained"]["total"] == found["trained_after_a_failure"]["total"] == 6.0
    assert found["trained"]["size"] == 3
    assert (found["trained_with_torch"]["total"], found["trained_with_torch"]["backend"]) == (6.0, "samestep")

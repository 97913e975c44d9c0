"""A rank that is stopped in a call, and goes on after the others' error, leaves their arrays alone."""

import json
import subprocess
import sys

import pytest
from running import script


def run_trials(*words):
    done = subprocess.run(
        [sys.executable, script("faults/woken_rank"), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("world", ["shm", pytest.param("hierarchical", marks=pytest.mark.slow)])
def test_a_rank_that_was_stopped_in_the_middle_of_an_allreduce_does_not_finish_it(world):
    found = run_trials("--world", world, "--trials", "4", "--inside")
    assert found["timed out"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("world", ["shm", "hierarchical", "tcp"])
def test_no_call_writes_into_the_arrays_of_ranks_that_have_given_up(world):
    run_trials("--world", world, "--trials", "28")

"""Jobs whose ranks leave steps together: over every transport and layout of hosts, and where a rank ends within one."""

import os
import subprocess

import pytest
from running import RUN_COMMAND, script

pytestmark = pytest.mark.slow

PROGRAM = script("faults/leave_steps")


@pytest.mark.parametrize(
    ("words", "n_ranks", "settings"),
    [
        ((), 4, {}),
        ((), 3, {"SAMESTEP_NATIVE_TRANSPORT": "tcp"}),
        ((), 4, {"PRETENDED_HOSTS": "aabb"}),
        ((), 3, {"PRETENDED_HOSTS": "aba"}),
        ((), 2, {"SAMESTEP_NATIVE_TRANSPORT": "tcp"}),
        (("--mpi",), 2, {}),
        (("--mpi",), 3, {"SAMESTEP_MPI_TRANSPORT": "mpi"}),
        (("--mpi",), 4, {"SAMESTEP_MPI_TRANSPORT": "mpi"}),
    ],
)
def test_steps_that_end_in_all_ways(words, n_ranks, settings):
    command = [*RUN_COMMAND, *words, "-n", str(n_ranks), PROGRAM]
    ended = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=100, check=False
    )
    text = ended.stdout + ended.stderr
    assert text.count("all steps") == n_ranks, text
    assert text.count(f"left: {n_ranks - 1} SystemExit") == n_ranks - 1, text
    assert text.count("has gone") == n_ranks - 1, text

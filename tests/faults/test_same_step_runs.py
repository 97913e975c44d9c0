"""Programs over shards: one hash at every size and over every transport, also after a death and a restart."""

import os
import re
import subprocess

import pytest
from running import RUN_COMMAND, script

pytestmark = pytest.mark.slow

PROGRAM = script("faults/train_over_shards")
N_STEPS = 203  # of 29 epochs


def run(folder, n_ranks, *words, n_epochs=29, dies_at=0, checkpoint="none", **variables):
    if checkpoint == "none":
        (folder / "none").unlink(missing_ok=True)
    command = [*RUN_COMMAND, *words, "-n", str(n_ranks), PROGRAM]
    return subprocess.run(
        [*command, str(folder / checkpoint), str(n_epochs), str(dies_at)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def hash_of(done, n_steps, n_ranks):
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(rf"sha256 (\w{{64}}) after {n_steps} steps of {n_ranks} ranks", done.stdout)
    assert found, done.stdout
    return found[1]


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory):
    return hash_of(run(tmp_path_factory.mktemp("one"), 1), N_STEPS, 1)


TRANSPORTS = {
    "native": ((), {}),
    "tcp": ((), {"SAMESTEP_NATIVE_TRANSPORT": "tcp"}),
    "mpi": (("--mpi",), {"SAMESTEP_MPI_TRANSPORT": "mpi"}),
    "mpi and shared memory": (("--mpi",), {}),
}


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if "and" not in name])
def test_two_hundred_steps_have_one_hash_at_every_size(tmp_path, of_one_rank, transport, n_ranks):
    """Of 8 shards, which 3 and 5 ranks do not share evenly; those of the last step of an epoch have 1 item or none."""
    words, settings = TRANSPORTS[transport]
    assert hash_of(run(tmp_path, n_ranks, *words, **settings), N_STEPS, n_ranks) == of_one_rank


@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abcd", "aaab"])
@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_and_on_every_layout_of_hosts(tmp_path, of_one_rank, transport, hosts):
    words, settings = TRANSPORTS[transport]
    done = run(tmp_path, 4, *words, PRETENDED_HOSTS=hosts, **settings)
    assert hash_of(done, N_STEPS, 4) == of_one_rank


def test_a_killed_job_of_four_goes_on_with_three_ranks_bit_for_bit(tmp_path):
    whole = hash_of(run(tmp_path, 1, n_epochs=3), 21, 1)
    died = run(tmp_path, 4, n_epochs=3, dies_at=10, checkpoint="saved")
    assert died.returncode != 0
    assert "sha256" not in died.stdout
    resumed = run(tmp_path, 3, n_epochs=3, checkpoint="saved")
    assert hash_of(resumed, 21, 3) == whole

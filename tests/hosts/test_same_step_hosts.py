"""A run over shards has one hash on one host and on hosts that nothing but a network connects."""

import re
import sys

import lab as labs
import pytest
from lab import PATIENCE_S
from running import RUN_COMMAND, script

PROGRAM = script("faults/train_over_shards")
N_EPOCHS, N_STEPS = 29, 203


def hash_of(process, n_ranks):
    text, _ = process.communicate(timeout=3 * PATIENCE_S)
    found = re.search(rf"sha256 (\w{{64}}) after {N_STEPS} steps of {n_ranks} ranks", text)
    assert found, text
    return found[1]


@pytest.mark.parametrize(
    "flags", [[], ["--mpi", "--env=OMPI_MCA_mpi_yield_when_idle=1"]], ids=["native", "mpi"]
)
def test_one_host_of_four_two_of_two_and_four_of_one_have_the_hash_of_one_rank(tmp_path, flags):
    if reason := labs.missing():
        pytest.skip(reason)
    lab = labs.Lab(4)
    words = [PROGRAM, str(tmp_path / "none"), str(N_EPOCHS), "0"]
    try:
        alone = lab.start("node0", [sys.executable, *words], cwd=tmp_path)
        hashes = [hash_of(alone, 1)]
        for hosts in ("node0:4", "node0:2,node1:2", "node0:1,node1:1,node2:1,node3:1"):
            (tmp_path / "none").unlink(missing_ok=True)  # the checkpoint
            command = [*RUN_COMMAND, f"--hosts={hosts}", *flags, *words]
            hashes.append(hash_of(lab.start("node0", command, cwd=tmp_path), 4))
    finally:
        lab.close()
    assert len(set(hashes)) == 1

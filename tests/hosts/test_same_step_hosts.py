"""A run over shards has one hash on one host and on hosts that nothing but a network connects."""

import re
import sys

import lab as labs
import pytest
from lab import PATIENCE_S
from running import RUN_COMMAND, script

PROGRAM = script("faults/train_over_shards")
N_EPOCHS, N_STEPS = 29, 203
MANY = 13  # shards: no power of two, and no multiple of any number of ranks here

TRANSPORTS = {
    "native": ([], {}),  # shared memory within a host, TCP between hosts
    "tcp": ([], {"SAMESTEP_NATIVE_TRANSPORT": "tcp"}),
    "mpi": (["--mpi"], {"SAMESTEP_MPI_TRANSPORT": "mpi"}),
    "mpi-and-shared-memory": (["--mpi"], {}),
}
LAYOUTS = [  # ranks of each host, shards
    ([4], 8),
    ([2, 2], 8),
    ([1, 1, 1, 1], 8),
    ([2, 2], MANY),
    ([2, 1], 8),
    ([3, 2], MANY),
    ([4, 4], MANY),
    ([2, 2, 2, 2], 8),
    ([3, 3, 2], MANY),
]


@pytest.fixture(scope="module")
def lab_and_hashes(tmp_path_factory):
    """Four hosts, and by number of shards the hash of one rank."""
    if reason := labs.missing():
        pytest.skip(reason)
    lab = labs.Lab(4)
    folder, hashes = tmp_path_factory.mktemp("one"), {}
    for n_shards in (8, MANY):
        words = [sys.executable, *words_of(folder / str(n_shards), n_shards)]
        hashes[n_shards] = hash_of(lab.start("node0", words, cwd=folder), 1)
    yield lab, hashes
    lab.close()


def words_of(checkpoint, n_shards):
    return [PROGRAM, str(checkpoint), str(N_EPOCHS), "0", str(n_shards)]


def hash_of(process, n_ranks):
    text, _ = process.communicate(timeout=3 * PATIENCE_S)
    found = re.search(rf"sha256 (\w{{64}}) after {N_STEPS} steps of {n_ranks} ranks", text)
    assert found, text
    return found[1]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_every_layout_of_hosts_has_the_hash_of_one_rank(lab_and_hashes, tmp_path, transport, layout):
    (lab, hashes), (n_each, n_shards) = lab_and_hashes, layout
    flags, settings = TRANSPORTS[transport]
    hosts = ",".join(f"node{i}:{n}" for i, n in enumerate(n_each))
    passed_on = [f"--env={name}={value}" for name, value in settings.items()]
    if flags:
        passed_on.append("--env=OMPI_MCA_mpi_yield_when_idle=1")
    command = [*RUN_COMMAND, f"--hosts={hosts}", *flags, *passed_on, *words_of(tmp_path / "saved", n_shards)]
    process = lab.start("node0", command, cwd=tmp_path, env=settings)
    assert hash_of(process, sum(n_each)) == hashes[n_shards]

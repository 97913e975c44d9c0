"""A script that nothing has launched, and names of several backends in one string."""

import os
import subprocess
import sys

import pytest
from running import program
from torch_versions import finds_backends

torch = pytest.importorskip("torch")

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
)


def ended(backend, **variables):
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    return subprocess.run(
        [sys.executable, *program("torch_backend/collectives", "reduce_alone", backend)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@finds_backends
def test_a_script_that_nothing_has_launched_is_a_world_of_one():
    done = ended("samestep")
    assert (done.returncode, done.stdout) == (0, "1 [1.0, 1.0]\n"), done.stderr


@pytest.mark.slow
def test_a_rank_whose_number_was_forgotten_is_no_world_of_one():
    done = ended("samestep", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    assert "RANK expected" in done.stderr


@pytest.mark.slow
@finds_backends
def test_host_tensors_may_have_a_backend_beside_that_of_gpus():
    found = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = ended("cpu:samestep,cuda:nccl", **found)
    assert (done.returncode, done.stdout) == (0, "1 [1.0, 1.0]\n"), done.stderr

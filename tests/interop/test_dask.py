"""Ranks on the workers of a Dask cluster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("distributed")
PROGRAM = Path(__file__).parent / "programs" / "dask_job.py"


def run(*cases):
    done = subprocess.run(
        [sys.executable, PROGRAM, *cases], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_workers_are_ranks():
    found = run("totals", "one", "unknown")
    assert found["totals"] == [[[rank, 3, rank, 7.0] for rank in range(3)]] * 2  # one cluster, several jobs
    assert found["one"] == [[0, 1, 0, 2.0]]
    assert "the cluster has no worker tcp://127.0.0.1:1; it has tcp://" in found["unknown"]


@pytest.mark.slow
def test_a_rank_that_fails_is_the_error_and_the_cluster_goes_on():
    error, after = run("fails")["fails"]
    assert error == "ValueError: bad batch on rank 1"
    assert [result[3] for result in after] == [3.0] * 3


@pytest.mark.slow
def test_a_worker_that_dies_is_named():
    error = run("dies")["dies"]
    assert error.startswith("PeerLostError: ") and "rank 1" in error

"""Ranks of one machine that say they are on several hosts: the same bits, whatever the hosts."""

import json
import subprocess

import numpy as np
import pytest
from running import RUN_COMMAND, script

PATIENCE_S = 120
COUNT = 100_003
PROGRAM = script("hosts/pretended_hosts")


def found(backend, hosts):
    """What the four ranks print, which is the same."""
    command = [*RUN_COMMAND, "-n", "4"]
    command += ["--mpi"] if backend == "mpi" else ["--raw"]
    command += [PROGRAM, backend, hosts, str(COUNT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if "{" in line]
    assert lines == [lines[0]] * 4
    return lines[0]


@pytest.mark.parametrize("backend", ["native", "mpi"])
def test_one_host_of_four_two_of_two_and_four_of_one_agree_to_the_bit(backend):
    if backend == "mpi":
        pytest.importorskip("mpi4py")
    one, two, four = (found(backend, hosts) for hosts in ("0000", "0011", "0123"))
    flat = "mpi" if backend == "mpi" else "tcp"
    assert [each.pop("transport") for each in (one, two, four)] == ["shm", "hierarchical", flat]
    assert one == two == four


def test_elsewhere_sums_are_by_host_and_then_by_rank():
    import hashlib

    three = found("native", "0112")
    one = found("native", "0000")
    assert (three["transport"], three["exact"]) == ("hierarchical", one["exact"])
    a, b, c, d = (np.random.default_rng(rank).standard_normal(COUNT).astype("f4") for rank in range(4))
    assert three["summed"] == hashlib.sha256((a + (b + c)) + d).hexdigest()
    assert one["summed"] == hashlib.sha256((a + b) + (c + d)).hexdigest()

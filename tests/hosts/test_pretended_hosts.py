"""Ranks of one machine that say they are on several hosts: the same bits, whatever the hosts."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

PATIENCE_S = 120
COUNT = 100_003
SCRIPT = """
import hashlib, json, os
hosts = [int(host) for host in os.environ["HOSTS"]]
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
os.environ["SAMESTEP_HOST_ID"] = str(hosts[rank])
import numpy as np
import samestep as ss

world = ss.initialize(os.environ["BACKEND"], timeout=60)
n = world.size
bits, exact = hashlib.sha256(), hashlib.sha256()

def mine(count, seed=0):
    return np.random.default_rng(100 * seed + rank).standard_normal(count).astype("f4")

def place(x):
    y = world.empty(x.shape, x.dtype)
    y[...] = x
    return y

for count in (5, 3000, {COUNT}):
    for at in (np.copy, place):
        for op in ("sum", ss.AVG, ss.premul(rank + 0.3)):
            bits.update(world.allreduce(at(mine(count)), op))
        bits.update(world.allreduce(at(mine(count).astype("f2"))))
        bits.update(world.bcast(world.reduce(at(mine(count, 1)), "sum", root=n - 1), root=n - 1))
        bits.update(world.reduce_scatter(at(np.tile(mine(count, 2), (n, 1)))))
        exact.update(world.allreduce(at(mine(count)), "max"))
        exact.update(world.allreduce(at((mine(count) * 100).astype("i4")), ss.AVG))
        exact.update(world.allgather(at(mine(count, 3))))
        exact.update(world.bcast(at(mine(count, 4)), root=1))
summed = world.allreduce(mine({COUNT}))
print(json.dumps({"engine": world.engine, "bits": bits.hexdigest(), "exact": exact.hexdigest(), "summed":
      hashlib.sha256(summed).hexdigest()}), flush=True)
ss.finalize()
""".replace("{COUNT}", str(COUNT))


def found(tmp_path, backend, hosts):
    """What the four ranks print, which is the same."""
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "samestep", "run", "-n", "4"]
    command += ["--mpi"] if backend == "mpi" else ["--raw"]
    env = {**os.environ, "HOSTS": hosts, "BACKEND": backend}
    done = subprocess.run(
        [*command, str(script)], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if "{" in line]
    assert lines == [lines[0]] * 4
    return lines[0]


@pytest.mark.parametrize("backend", ["native", "mpi"])
def test_one_host_of_four_two_of_two_and_four_of_one_agree_to_the_bit(tmp_path, backend):
    if backend == "mpi":
        pytest.importorskip("mpi4py")
    one, two, four = (found(tmp_path, backend, hosts) for hosts in ("0000", "0011", "0123"))
    flat = "mpi" if backend == "mpi" else "tcp"
    assert [each.pop("engine") for each in (one, two, four)] == ["node", "hier", flat]
    assert one == two == four


def test_elsewhere_sums_are_by_host_and_then_by_rank(tmp_path):
    import hashlib

    three = found(tmp_path, "native", "0112")
    one = found(tmp_path, "native", "0000")
    assert (three["engine"], three["exact"]) == ("hier", one["exact"])
    a, b, c, d = (np.random.default_rng(rank).standard_normal(COUNT).astype("f4") for rank in range(4))
    assert three["summed"] == hashlib.sha256((a + (b + c)) + d).hexdigest()
    assert one["summed"] == hashlib.sha256((a + b) + (c + d)).hexdigest()

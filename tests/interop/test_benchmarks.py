"""The benchmark runs from its command line: contenders take turns, results are right, what was found is stored."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from running import RUN_COMMAND, script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

WRONG = script("interop/wrong_contender")


def run(program: Path, *words: str, cwd: Path, n: int = 2) -> subprocess.CompletedProcess[str]:
    command = [*RUN_COMMAND, "--mpi", "--raw", "-n", str(n), str(program), *words]
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(autouse=True)
def there() -> None:
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmarks are not part of this tree")


def test_every_verb_is_measured_and_stored(tmp_path: Path) -> None:
    who = ["mpi4py", "samestep", "shared", "limit"]
    few = ["--sizes", "12,64KiB", "--seconds", "1", "--rounds", "2", "--burst", "5"]
    few += ["--dtypes", "float32,float16", "--contenders", ",".join(who)]
    verbs = [
        "allreduce",
        "bcast",
        "allgather",
        "reduce_scatter",
        "alltoall",
        "sendrecv",
        "barrier",
        "synchronize",
    ]
    done = run(
        BENCHMARKS / "collectives.py", *few, "--verbs", ",".join(verbs), "--json", "a.json", cwd=tmp_path, n=3
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["ranks"] == 3
    assert found["contenders"] == who
    assert list(dict.fromkeys(point["cell"]["verb"] for point in found["points"])) == verbs
    for point in found["points"]:
        cell, measured = point["cell"], set(point["summaries"])
        expected = {"mpi4py", "samestep", "shared"}
        limited = cell["verb"] in ("allreduce", "bcast", "allgather", "alltoall", "sendrecv")
        if limited and cell["nbytes"] >= 1 << 16 and cell["dtype"] == "float32":
            expected.add("limit")
        if cell["dtype"] == "float16":
            expected.add("shared_float32")
            measured.add("mpi4py")  # not every MPI library has the type
        assert measured == expected, cell
        for summary in point["summaries"].values():
            assert 0 < summary["min_us"] <= summary["median_us"] <= summary["p99_us"]
            assert len(summary["rounds_us"]) == point["rounds"] >= 1


def test_a_wrong_result_ends_the_run(tmp_path: Path) -> None:
    few = ["--sizes", "8", "--seconds", "1", "--rounds", "1", "--verbs", "allreduce", "--dtypes", "float32"]
    done = run(WRONG, *few, "--contenders", "mpi4py,wrong", cwd=tmp_path)
    assert done.returncode != 0
    assert "wrong is wrong: allreduce of 8 bytes on rank 1 of 2" in done.stderr


def test_an_unknown_contender_is_refused_with_those_there_are(tmp_path: Path) -> None:
    done = run(BENCHMARKS / "collectives.py", "--contenders", "nccl", cwd=tmp_path, n=1)
    assert done.returncode == 2
    assert "nccl; known are mpi4py, samestep, shared, gloo, limit" in done.stderr

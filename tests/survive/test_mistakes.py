"""What users get wrong, or do in a way of their own, is right or refused on all ranks."""

import json
import subprocess

import pytest
from running import RUN_COMMAND, program


def run(function, *values, n=2, words=("--min-ranks", "1"), timeout=60):
    command = [*RUN_COMMAND, "-n", str(n), "--raw", *words, *program("survive/mistakes", function, *values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("result ")]
    return done.returncode, found, done.stderr


def test_tensors_that_the_program_knows_by_other_names():
    pytest.importorskip("torch")
    assert run("torch_under_other_names", n=3)[:2] == (0, [[0.0, 0.0, 0.0, True]])


def test_only_the_world_goes_on():
    code, _, err = run("subgroup")
    assert code == 1
    assert "cannot go on after a loss; give it what initialize() returns" in err

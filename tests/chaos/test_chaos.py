"""A few random faults, and more of them as a slow test; `python tests/chaos/chaos.py --faults 2000` does many."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("n", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_survivors_of_random_faults_get_an_error_in_time(n):
    program = Path(__file__).with_name("chaos.py")
    done = subprocess.run(
        [sys.executable, str(program), "--faults", str(n), "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| all | {n} |" in done.stdout

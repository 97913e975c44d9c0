"""A few random faults; `python tests/chaos/chaos.py --faults 400` does more of them."""

import subprocess
import sys
from pathlib import Path


def test_survivors_of_random_faults_get_an_error_in_time():
    program = Path(__file__).with_name("chaos.py")
    done = subprocess.run(
        [sys.executable, str(program), "--faults", "5", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all | 5 |" in done.stdout

"""torch's own tests of its backends pass on this one, as listed in torch_suite_names.txt."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest")

SUITE = Path(__file__).with_name("torch_suite.py")


def test_torchs_own_tests():
    job = subprocess.Popen(
        [sys.executable, str(SUITE), "--all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = job.communicate(timeout=900)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)  # those side by side, and their ranks
        raise
    wrong = [line for line in printed.splitlines() if line.startswith(("FAIL", "SKIP"))]
    assert job.returncode == 0, "\n".join(wrong)[-8000:] or printed[-8000:]
    assert printed.count("\nOK ") + printed.startswith("OK ") > 0


def test_every_name_is_either_on_the_list_or_left_out_with_a_reason():
    torch_version = pytest.importorskip("torch").__version__
    if not torch_version.startswith("2.13."):
        pytest.skip(f"the list is for the tests of torch 2.13, this is {torch_version}")
    done = subprocess.run(
        [sys.executable, str(SUITE), "--list"], capture_output=True, text=True, timeout=600, check=False
    )
    lines = [
        line for line in SUITE.with_name("torch_suite_names.txt").read_text().splitlines() if line[0] != "#"
    ]
    known = {line[2:].partition(":")[0] for line in lines}
    assert known == set(done.stdout.split())
    assert all(line.partition(": ")[2] for line in lines if line[0] == "-")

"""The class for a torch whose backends Python may write, with a stand-in for torch's: this torch may be older."""

import subprocess
import sys

import pytest
from running import script

pytest.importorskip("torch")

PROGRAM = script("torch_backend/later_torch")


@pytest.mark.parametrize(
    ("doc", "expected"),
    [
        (
            "__init__(self: torch._C._distributed_c10d.Backend, rank: int, size: int) -> None",
            "DeviceBackend samestep (0, 1) 1",
        ),
        ("Initialize self.  See help(type(self)) for accurate signature.", "ProcessGroup samestep None 1"),
        ("none", "ProcessGroup samestep None 1"),
    ],
    ids=["later", "2.13", "without a text"],
)
def test_what_is_made_follows_from_what_torch_lets_python_write(doc, expected):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, doc],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected

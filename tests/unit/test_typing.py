"""The types of the public interface, as a type checker sees them."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_types_are_found_and_wrong_names_refused(tmp_path):
    pytest.importorskip("mypy")
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        str(tmp_path),
        "--config-file",
        "pyproject.toml",
    ]
    ended = subprocess.run(
        [*command, "tests/unit/typing_cases.py"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr

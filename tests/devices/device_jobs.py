"""Ranks as processes of their own, that meet through a file store and have fake devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_libraries

PATIENCE_S = 90.0


class Ended:
    """How one rank has ended, and what it reported."""

    def __init__(self, code: int, text: str) -> None:
        self.code, self.text = code, text
        self.reports: list[dict[str, Any]] = [
            json.loads(line[1:]) for line in text.split("\n") if line.startswith("\0")
        ]

    def __repr__(self) -> str:
        return f"ended with {self.code}:\n{self.text}"


def with_fakes() -> str:
    """PYTHONPATH with which a program finds `fake_arrays`."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(fake_libraries.HERE), *([inherited] if inherited else [])])


def run(
    folder: Path,
    program: list[str],
    n: int,
    *,
    of_rank: dict[int, dict[str, str]] | None = None,
    hip: bool = False,
    **variables: str,
) -> list[Ended]:
    """Run `python *program` on `n` ranks; `of_rank`: more variables for some; `hip`: on the stand-ins of ROCm."""
    hidden = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    common = {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("OMPI_")}
    common |= fake_libraries.environment(hip) | {"PYTHONPATH": with_fakes(), "TMPDIR": str(folder)}
    common |= {"TEST_SIZE": str(n), "TEST_FOLDER": str(folder)} | variables
    processes = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=common | {"TEST_RANK": str(rank)} | (of_rank or {}).get(rank, {}),
            text=True,
        )
        for rank in range(n)
    ]
    try:
        texts = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
        return [Ended(process.wait(), text) for process, text in zip(processes, texts, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()

"""Ranks as processes of their own, that meet through a file store and have fake devices."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

import fake_libraries
import forked

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


class Job:
    """Ranks that run `program` in processes that have imported the package.

    `of_rank`: more variables for some; `hip`: on the stand-ins of ROCm.
    """

    def __init__(
        self,
        folder: Path,
        program: list[str],
        n: int,
        *,
        of_rank: dict[int, dict[str, str]] | None = None,
        hip: bool = False,
        **variables: str,
    ) -> None:
        hidden = ("RANK", "WORLD_SIZE", "MASTER_PORT")
        common = {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("OMPI_")}
        common |= fake_libraries.environment(hip) | {"PYTHONPATH": with_fakes(), "TMPDIR": str(folder)}
        common |= {"TEST_SIZE": str(n), "TEST_FOLDER": str(folder)} | variables
        self._ranks: list[tuple[forked.Process, BinaryIO]] = []
        for rank in range(n):
            output = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
            environ = common | {"TEST_RANK": str(rank)} | (of_rank or {}).get(rank, {})
            self._ranks.append((forked.start(program, environ, output.fileno()), output))

    def end(self) -> list[Ended]:
        """Wait for all ranks; none runs afterwards."""
        deadline = time.monotonic() + PATIENCE_S
        try:
            return [
                Ended(process.wait(deadline - time.monotonic()), _text(output))
                for process, output in self._ranks
            ]
        finally:
            for process, output in self._ranks:
                process.kill()
                output.close()


def _text(output: BinaryIO) -> str:
    output.seek(0)
    return output.read().decode()


def run(folder: Path, program: list[str], n: int, **options: Any) -> list[Ended]:
    return Job(folder, program, n, **options).end()


def run_each(folder: Path, programs: dict[str, list[str]], n: int, **options: Any) -> dict[str, list[Ended]]:
    """As `run`, for programs that mostly wait: up to three at a time, each in a folder of its own."""
    ended = {}
    for names in itertools.zip_longest(*[iter(programs)] * 3):
        jobs = {}
        for name in filter(None, names):
            (folder / name).mkdir()
            jobs[name] = Job(folder / name, programs[name], n, **options)
        ended |= {name: job.end() for name, job in jobs.items()}
    return ended

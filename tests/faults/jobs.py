"""Whole jobs as a user starts them: a program under mpirun, watched from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from samestep.launch import mpirun


class Ended(NamedTuple):
    """How a job has ended. `text`: everything it printed; `at`: when it ended, as `time.time` says."""

    code: int
    text: str
    seconds: float
    at: float


def run(
    n: int, program: Sequence[str], *, timeout: float = 100, words: Sequence[str] = (), **environ: str
) -> Ended:
    """Run `python *program` on `n` ranks, or in one process without a launcher if n is 0. `words`: of the launcher.

    Raises:
      subprocess.TimeoutExpired: it had not ended after `timeout` seconds; it has been killed.
    """
    argv, extra = [sys.executable, *program], {}
    if n:
        argv, extra = mpirun.command(n, argv)
        argv[1:1] = words
    start = time.monotonic()
    with subprocess.Popen(
        argv,
        env=os.environ | extra | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun ends its ranks
            raise
    return Ended(process.returncode, text, time.monotonic() - start, time.time())

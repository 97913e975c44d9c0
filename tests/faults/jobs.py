"""Whole jobs as a user starts them: a script under mpirun, watched from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

from samestep.launch import mpirun


class Ended(NamedTuple):
    """How a job has ended. `text`: everything it printed."""

    code: int
    text: str
    seconds: float


def run(n: int, script: str, folder: Path, *, timeout: float = 100, **environ: str) -> Ended:
    """Run `script` on `n` ranks, or in one process without a launcher if n is 0.

    Raises:
      subprocess.TimeoutExpired: it had not ended after `timeout` seconds; it has been killed.
    """
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    argv, extra = [sys.executable, str(path)], {}
    if n:
        argv, extra = mpirun.command(n, argv)
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
    return Ended(process.returncode, text, time.monotonic() - start)

"""Jobs as a user starts them, watched from outside."""

import os
import subprocess
import sys
import uuid
from typing import NamedTuple

from running import processes_with

PATIENCE_S = 100
MARK = "SAMESTEP_TEST_JOB"
_LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "OMP_")
_KEPT = "OMPI_MCA_btl_sm_backing_directory"  # see leftovers.py


class Ended(NamedTuple):
    """How it ended, what it printed, and the processes it left behind."""

    code: int
    out: str
    err: str
    left: list


class DistributedJob:
    """A Python program, started at once."""

    def __init__(self, folder, *argv, env=None):
        self._mark = uuid.uuid4().hex
        inherited = {k: v for k, v in os.environ.items() if k == _KEPT or not k.startswith(_LAUNCHERS)}
        self.process = subprocess.Popen(
            [sys.executable, *map(str, argv)],
            cwd=folder,
            env={**inherited, MARK: self._mark, "TMPDIR": str(folder), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self):
        try:
            out, err = self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            for pid in self.processes():
                os.kill(pid, 9)
            out, err = self.process.communicate()
            raise AssertionError(f"still running after {PATIENCE_S} s:\n{out}\n{err}") from None
        left = self.processes()
        for pid in left:
            os.kill(pid, 9)
        return Ended(self.process.returncode, out, err, left)

    def processes(self):
        """Those of the job that still run; zombies do not count."""
        return processes_with(f"{MARK}={self._mark}")


def launch(folder, program, *flags, env=None):
    """`python -m samestep.distributed.launch` with a program and its arguments, to its end."""
    return DistributedJob(folder, "-m", "samestep.distributed.launch", *flags, *program, env=env).wait()

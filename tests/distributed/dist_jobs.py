"""Jobs as a user starts them, watched from outside."""

import os
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path
from typing import NamedTuple

PATIENCE_S = 100
MARK = "SAMESTEP_TEST_JOB"
_LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "OMP_")


class Ended(NamedTuple):
    """How it ended, what it printed, and the processes it left behind."""

    code: int
    out: str
    err: str
    left: list


class Job:
    """A Python program, started at once."""

    def __init__(self, folder, *argv, script="", env=None):
        self._mark = uuid.uuid4().hex
        folder = Path(folder)
        if script:
            (folder / "train.py").write_text(textwrap.dedent(script))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
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
        """Those of the job that run, whoever their parent is."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                environ = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
                state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] if environ else b"Z"
            except OSError:  # it ended meanwhile
                continue
            if state not in b"ZX" and f"{MARK}={self._mark}".encode() in environ.split(b"\0"):
                found.append(int(entry.name))
        return found


def launch(folder, script, *flags, words=(), env=None):
    """`python -m samestep.distributed.launch` with a script, to its end."""
    flags = ["-m", "samestep.distributed.launch", *flags, "train.py", *words]
    return Job(folder, *flags, script=script, env=env).wait()

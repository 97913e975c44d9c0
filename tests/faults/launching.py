"""Runs `samestep run` on small scripts, and looks for processes that it left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "SAMESTEP_TEST_RUN"
PATIENCE_S = 60.0
WAYS = ("--mpi", "--native")


def marked(mark):
    """Processes that have `mark` in their environment, whoever their parent is; not those that only wait."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes()
            state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:  # it ended meanwhile
            continue
        if state not in b"ZX" and f"{MARK}={mark}".encode() in environ.split(b"\0"):
            found.append(int(entry.name))
    return found


def until(happened, seconds, what):
    """Waits for `happened()` to be true; fails with `what` after `seconds`. Returns the time it took."""
    begin = time.monotonic()
    while not happened():
        assert time.monotonic() - begin < seconds, what
        time.sleep(0.02)
    return time.monotonic() - begin


# A shell starts what it runs in the background deaf to Ctrl-C, and nohup to SIGHUP; these start a program as one in the
# foreground.
_FOREGROUND = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
_ON_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)" + _FOREGROUND


def in_foreground(argv):
    """`argv` so that it hears Ctrl-C."""
    return [sys.executable, "-I", "-S", "-c", _FOREGROUND, *argv]


def on_terminal(argv, **options):
    """Starts a program in a session whose terminal is (process, our end of the terminal)."""
    ours, theirs = os.openpty()
    argv = [sys.executable, "-I", "-S", "-c", _ON_TERMINAL, *argv]
    process = subprocess.Popen(
        argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, **options
    )
    os.close(theirs)
    return process, ours


class Run:
    """One `samestep run`, in a session of its own, with its outputs in files.

    `way`: `--mpi` or `--native`.
    """

    def __init__(self, folder, way, script, *words, n=2, stdin=subprocess.DEVNULL, env=None, together=False):
        self.mark = uuid.uuid4().hex
        program = folder / f"script-{self.mark}.py"
        program.write_text(script)
        self._out, self._err = folder / f"out-{self.mark}", folder / f"err-{self.mark}"
        self.way = way
        environment = {**os.environ, "TMPDIR": str(folder), MARK: self.mark, **(env or {})}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                in_foreground(
                    [sys.executable, "-m", "samestep", "run", way, "-n", str(n), *words, str(program)]
                ),
                stdin=stdin,
                stdout=out,
                stderr=subprocess.STDOUT if together else err,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )

    @property
    def out(self):
        return self._out.read_text()

    @property
    def err(self):
        return self._err.read_text()

    def wait(self):
        """The exit code."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"still running after {PATIENCE_S} s:\n{self.out}\n{self.err}") from None

    def until_all_say(self, word, n=2):
        """Waits until `n` ranks have printed `word`."""
        until(
            lambda: self.out.count(word) == n or self.process.poll() is not None,
            PATIENCE_S,
            f"no {n} times {word!r}",
        )
        assert self.out.count(word) == n, self.err

    def left(self):
        """Processes of the run."""
        return marked(self.mark)

    def end(self):
        """For a test that has failed: leaves nothing behind."""
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def told(run):
    """What each rank printed as JSON on one line."""
    assert run.wait() == 0, run.err
    lines = [re.fullmatch(r"\[(\d+)\] (.*)", line).groups() for line in run.out.splitlines()]
    return {int(rank): json.loads(text) for rank, text in lines}

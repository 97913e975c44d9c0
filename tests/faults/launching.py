"""Runs `samestep run` on the programs of this folder, and looks for processes that it left behind."""

import array
import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
import uuid
from subprocess import PIPE

import forked
from running import processes_with, script

MARK = "SAMESTEP_TEST_RUN"
PATIENCE_S = 60.0
WAYS = ("--mpi", "--native")


def until(happened, seconds, what, since=None):
    """Waits for `happened()` to be true; fails with `what` after `seconds`. Returns the seconds.

    They count from the monotonic time `since`, which is to be read before what is to have arrived no earlier.
    """
    begin = time.monotonic() if since is None else since
    while not happened():
        assert time.monotonic() - begin < seconds, what
        time.sleep(0.02)
    return time.monotonic() - begin


_FOREGROUND = [sys.executable, "-I", "-S", script("faults/foreground")]


def in_foreground(argv):
    """`argv` so that it hears Ctrl-C."""
    return [*_FOREGROUND, *argv]


def on_terminal(argv, *, env=None, **options):
    """Starts a program in a session of its own on a terminal that redraws lines: (process, our end of the terminal)."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, array.array("H", [24, 80, 0, 0]))
    inherited = {name: value for name, value in os.environ.items() if name not in ("CI", "JPY_PARENT_PID")}
    options["env"] = {**inherited, "TERM": "xterm", **(env or {})}
    argv = [*_FOREGROUND, "--terminal", *argv]
    process = subprocess.Popen(
        argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, **options
    )
    os.close(theirs)
    return process, ours


class Run:
    """One `samestep run`, in a session of its own, with its outputs in files.

    `launcher`: `--mpi` or `--native`; `program`: from `running.program`; `words`: options of the launcher; `stdin`: an
    open file, or PIPE for one that the attribute `stdin` writes to.
    """

    def __init__(self, folder, launcher, program, *words, n=2, stdin=None, env=None, together=False):
        self.mark = uuid.uuid4().hex
        self._out, self._err = folder / f"out-{self.mark}", folder / f"err-{self.mark}"
        self.launcher = launcher
        environment = {**os.environ, "TMPDIR": str(folder), MARK: self.mark, **(env or {})}
        argv = ["-m", "samestep", "run", launcher, "-n", str(n), *words, *program]
        with contextlib.ExitStack() as files:
            out, err = (files.enter_context(path.open("wb")).fileno() for path in (self._out, self._err))
            if stdin == PIPE:
                reading, writing = os.pipe()
                stdin, self.stdin = (
                    files.enter_context(os.fdopen(reading)),
                    os.fdopen(writing, "wb", buffering=0),
                )
            self.process = forked.start(
                argv,
                environment,
                out,
                errors=out if together else err,
                stdin=None if stdin is None else stdin.fileno(),
                folder=folder,
            )

    @property
    def out(self):
        return self._out.read_text()

    @property
    def err(self):
        return self._err.read_text()

    def wait(self, seconds=PATIENCE_S):
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except TimeoutError:
            self.end()
            raise AssertionError(f"still running after {seconds} s:\n{self.out}\n{self.err}") from None

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
        launcher = [self.process.pid] if self.process.poll() is None else []
        return [*launcher, *processes_with(f"{MARK}={self.mark}")]

    def end(self):
        """For a test that has failed: leaves nothing behind."""
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)


def reports(run, seconds=PATIENCE_S):
    """What each rank printed as JSON on one line, by rank."""
    assert run.wait(seconds) == 0, run.err
    lines = [re.fullmatch(r"\[(\d+)\] (.*)", line).groups() for line in run.out.splitlines()]
    return {int(rank): json.loads(text) for rank, text in lines}

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

from running import RUN_COMMAND, processes_with, script

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

    `launcher`: `--mpi` or `--native`; `program`: from `running.program`; `words`: options of the launcher.
    """

    def __init__(
        self, folder, launcher, program, *words, n=2, stdin=subprocess.DEVNULL, env=None, together=False
    ):
        self.mark = uuid.uuid4().hex
        self._out, self._err = folder / f"out-{self.mark}", folder / f"err-{self.mark}"
        self.launcher = launcher
        environment = {**os.environ, "TMPDIR": str(folder), MARK: self.mark, **(env or {})}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                in_foreground([*RUN_COMMAND, launcher, "-n", str(n), *words, *program]),
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

    def wait(self, seconds=PATIENCE_S):
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
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
        return processes_with(f"{MARK}={self.mark}")

    def end(self):
        """For a test that has failed: leaves nothing behind."""
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def reports(run, seconds=PATIENCE_S):
    """What each rank printed as JSON on one line, by rank."""
    assert run.wait(seconds) == 0, run.err
    lines = [re.fullmatch(r"\[(\d+)\] (.*)", line).groups() for line in run.out.splitlines()]
    return {int(rank): json.loads(text) for rank, text in lines}

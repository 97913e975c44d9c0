"""What tests of jobs that go on after a loss share."""

import subprocess

from running import RUN_COMMAND, program

PATIENCE_S = 120


def run(function, *values, n=4, words=()):
    """Runs a function of programs/train.py: exit code, what it printed, what the launcher said."""
    command = [*RUN_COMMAND, "-n", str(n), "--raw", *words, *program("survive/train", function, *values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return done.returncode, done.stdout, done.stderr


def elastic(least=1, restarts=0):
    return ["--min-ranks", str(least), "--max-restarts", str(restarts)]


def result(done):
    code, out, err = done
    (line,) = [line for line in out.splitlines() if line.startswith("result ")]
    assert code == 0, err
    return line.split()[1:]

"""`samestep.multiprocessing.spawn` in notebooks and scripts, and when its caller ends."""

import signal
import subprocess
import sys
import time

import pytest
from dist_jobs import DistributedJob
from running import script

IN_SESSION = """
import samestep.multiprocessing as mp

def train(i):
    pass

class Settings:
    pass
"""


@pytest.mark.parametrize(
    ("call", "name"), [("mp.spawn(train, nprocs=2)", "train"), ("mp.spawn(print, (Settings(),))", "Settings")]
)
def test_what_a_notebook_defines_cannot_be_imported_and_the_error_says_what_to_do(call, name):
    done = subprocess.run(
        [sys.executable, "-"],
        input=IN_SESSION + call,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"samestep.InvalidArgumentError: spawn: {name} is defined in a notebook or an interactive"
    )
    assert last.endswith(f"with `%%writefile train.py`, then `import train` and pass train.{name}")


@pytest.mark.parametrize("guard", ["if True:", "if __name__ == '__main__':"])
def test_a_script_has_to_guard_its_call(guard, tmp_path):
    """New processes import it, to find what it defines."""
    (tmp_path / "script.py").write_text(f"{IN_SESSION}\n{guard}\n    mp.spawn(train, nprocs=1)")
    line = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode == 0) == ("name" in guard)
    assert ("Put the call under `if __name__ == '__main__':`" in done.stderr) == (done.returncode != 0)


STAY = script("distributed/spawn_and_stay")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_their_parent(tmp_path, signum):
    job = DistributedJob(tmp_path, STAY)
    for _ in range(2):
        assert job.process.stdout.readline() == "here\n"
    job.process.send_signal(signum)
    job.process.wait(60)
    deadline = time.monotonic() + 30
    while job.processes() and time.monotonic() < deadline:
        time.sleep(0.02)
    ended = job.wait()
    assert ended.left == []
    if signum == signal.SIGINT:
        assert ended.code in (-signal.SIGINT, 1, 130)
        assert ended.err.count("Traceback") == 1  # the parent's
        assert ended.err.rstrip().endswith("KeyboardInterrupt")
    assert list(tmp_path.iterdir()) == []

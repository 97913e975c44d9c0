"""Ranks join a job that runs, from a launcher of their own, and the result has the bits of a run without them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from running import RUN_COMMAND, program

PATIENCE_S = 60
REFUSED_WITHIN_S = 10.0
SECRET = {"SAMESTEP_SECRET": "of this test"}


class Launcher:
    """One `samestep run`, whose output goes to files."""

    def __init__(self, folder, name, words, env):
        outside = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP_")}
        self._files = [folder / f"{name}.out", folder / f"{name}.err"]
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self.process = subprocess.Popen(
                [*RUN_COMMAND, *words], stdout=out, stderr=err, env={**outside, **env}, start_new_session=True
            )

    @property
    def out(self):
        return self._files[0].read_text()

    @property
    def err(self):
        return self._files[1].read_text()

    def await_err(self, pattern):
        until = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self.err)):
            assert self.process.poll() is None and time.monotonic() < until, self.err
            time.sleep(0.01)
        return found

    def code(self):
        return self.process.wait(PATIENCE_S)

    def result(self):
        assert self.code() == 0, self.err
        (line,) = [line for line in self.out.splitlines() if line.startswith("result ")]
        return line.split()[1:]


@pytest.fixture
def launch(tmp_path):
    """`launch(words)`: a launcher that lets others join, or with `joins=job` one that joins it."""
    made = []

    def start(words, *flags, n=2, joins=None, env=SECRET):
        if joins is None:
            flags = ("--raw", "--min-ranks=1", "--listen=0", *flags)
        else:
            found = joins.await_err(r"samestep run --join \S+:(\d+) -n K")
            flags = (f"--join=127.0.0.1:{found[1]}", *flags)
        made.append(Launcher(tmp_path, f"launcher {len(made)}", [f"-n{n}", *flags, *words], env))
        return made[-1]

    yield start
    for launcher in made:
        if launcher.process.poll() is None:
            os.killpg(launcher.process.pid, signal.SIGKILL)
            launcher.process.wait(PATIENCE_S)


def undisturbed(folder):
    (folder / "alone").mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP_")}
    command = [sys.executable, *program("survive/train", "grows", str(folder / "alone"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=env)
    return done.stdout.split()[1:3]


def await_file(path, launcher):
    until = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert launcher.process.poll() is None and time.monotonic() < until, launcher.err
        time.sleep(0.01)


def test_ranks_join_and_get_the_state(launch, tmp_path):
    """Whatever their own host says of transports: all ranks need the same."""
    words = program("survive/train", "grows", str(tmp_path), 4)
    job = launch(words, "--logs", str(tmp_path / "logs"))
    joined = launch(words, joins=job, env={**SECRET, "SAMESTEP_NATIVE_TRANSPORT": "tcp"})
    assert job.result() == [*undisturbed(tmp_path), "4"]
    assert "rank 3 has gone on from step" in (tmp_path / "logs" / "rank_3.out").read_text()
    assert joined.code() == 0
    assert "rank 2 joins the job" in job.err and "rank 3 joins the job" in job.err
    assert joined.out == ""
    assert re.fullmatch(
        r"samestep: joined the job at 127.0.0.1:\d+, whose launcher shows what the ranks print\n"
        r"samestep: the job at 127.0.0.1:\d+ has ended with exit code 0\n",
        joined.err,
    )


@pytest.mark.parametrize(
    "signum",
    [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGKILL))],
)
def test_ranks_that_have_joined_are_lost_with_their_launcher(launch, tmp_path, signum):
    """And the job is not stopped, though its state is one that a SIGTERM to any rank stops."""
    words = program("survive/train", "grows", str(tmp_path), 3, True)
    job = launch(words, "--max-restarts=3", n=1)
    joined = launch(words, joins=job)
    await_file(tmp_path / "grown to 3", job)
    joined.process.send_signal(signum)
    assert joined.code() == (-signum if signum == signal.SIGKILL else 128 + signum)
    job.await_err("1 of [23] ranks are left")
    (tmp_path / "go").touch()
    assert job.result() == [*undisturbed(tmp_path), "1"]
    assert not (tmp_path / "state.npz").exists()
    assert {path.name for path in tmp_path.glob("rank *")} == {"rank 0.0", "rank 1.1", "rank 2.1"}


@pytest.mark.slow
def test_a_rank_that_has_joined_is_started_again(launch, tmp_path):
    words = program("survive/train", "grows", str(tmp_path), 2, True)
    job = launch(words, "--max-restarts=1", n=1)
    launch(words, joins=job, n=1)
    await_file(tmp_path / "grown to 2", job)
    os.kill(int((tmp_path / "rank 1.1").read_text()), signal.SIGKILL)
    await_file(tmp_path / "rank 1.2", job)
    (tmp_path / "go").touch()
    assert job.result()[:2] == undisturbed(tmp_path)


@pytest.mark.parametrize("how", ["fails", pytest.param("is killed", marks=pytest.mark.slow)])
def test_who_has_joined_ends_with_the_job(launch, tmp_path, how):
    words = program("survive/train", "grows", str(tmp_path), 3, how == "is killed", how == "fails")
    job = launch(words, n=2)
    joined = launch(words, joins=job, n=1)
    if how == "is killed":
        await_file(tmp_path / "grown to 3", job)
        job.process.kill()
    assert joined.code() == 1
    if how == "fails":
        assert job.code() == 1
        assert joined.err.endswith("has ended with exit code 1\n")
    else:
        assert "has ended, or its launcher cannot be reached, so the ranks here have ended, too" in joined.err


@pytest.mark.slow
def test_a_stranger_is_refused_and_told_why_at_both_ends(launch, tmp_path):
    words = program("survive/train", "grows", str(tmp_path), 2)
    job = launch(words, n=1)
    job.await_err("to add K ranks")
    began = time.monotonic()
    stranger = launch(words, joins=job, n=1, env={"SAMESTEP_SECRET": "of another job"})
    assert stranger.code() == 1
    job.await_err("it left when it saw another secret than its own")
    assert time.monotonic() - began < REFUSED_WITHIN_S
    for err in (stranger.err, job.err):
        assert "the same SAMESTEP_SECRET, --secret-file or ~/.config/samestep/secret" in err.replace(
            "\n", " "
        )
    assert "does not know this job's secret" in stranger.err
    assert not (tmp_path / "rank 1.1").exists()
    launch(words, joins=job, n=1)
    assert job.result() == [*undisturbed(tmp_path), "2"]


@pytest.mark.slow
def test_ranks_of_another_version_do_not_join(launch, tmp_path):
    words = program("survive/train", "grows", str(tmp_path), 2)
    job = launch(words, n=1)
    launch(words, joins=job, n=1, env={**SECRET, "OTHER_VERSION": "9.9"})
    job.await_err(
        "MismatchError: initialize: this rank was started later and runs samestep 9.9, but the others run"
    )
    launch(words, joins=job, n=1)
    assert job.result() == [*undisturbed(tmp_path), "2"]
    assert {path.name for path in tmp_path.glob("rank *")} == {"rank 0.0", "rank 2.1"}


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        words = [*RUN_COMMAND, "-n1", "--min-ranks=1", f"--listen={port}", "--no-python", "true"]
        env = {**os.environ, **SECRET}
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=env)
    assert done.returncode == 2
    assert f"cannot listen at port {port}: Address already in use" in done.stderr


def test_nobody_listens(launch, tmp_path):
    words = [*RUN_COMMAND, "--join=127.0.0.1:1", "-n1", *program("survive/train", "grows", str(tmp_path))]
    env = {**os.environ, **SECRET}
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=env)
    assert done.returncode == 1
    assert "cannot join the job at 127.0.0.1:1: [Errno 111] Connection refused" in done.stderr


def test_a_program_without_a_state_starts_nobody(launch, tmp_path):
    words = program("survive/train", "without_state", str(tmp_path))
    job = launch(words)
    joined = launch(words, joins=job, n=1)
    job.await_err("rank 2 joins the job")
    (tmp_path / "go").touch()
    assert job.result() == ["0.0", "1.0"]
    assert joined.code() == 0
    assert not list(tmp_path.glob("rank 2*"))


@pytest.mark.parametrize("flags", [["--min-ranks=1", "--listen=0"], ["--join=127.0.0.1:1"]])
def test_there_is_no_joining_without_a_secret(flags, tmp_path):
    env = {**os.environ, "SAMESTEP_SECRET": ""}
    words = [*RUN_COMMAND, "-n1", *flags, "--no-python", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=env)
    assert done.returncode == 2
    assert "need a secret that both launchers know; set the same SAMESTEP_SECRET" in done.stderr

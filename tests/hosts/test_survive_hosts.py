"""Jobs on several hosts go on after the loss of ranks and of hosts, with the same bits."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from lab import PATIENCE_S
from running import RUN_COMMAND, program

KILLED_WITHIN_S = 5.0  # from a loss to the end of the next step
SILENT_WITHIN_S = 15.0
ELASTIC = ["--raw", "--min-ranks=1", "--max-restarts=10"]
TRAINING = "survive/train", "numpy"
LISTENING = ["--listen=29400"]
SECRET = {"SAMESTEP_SECRET": "of this laboratory"}


@pytest.fixture
def run(lab, tmp_path):
    """Starts `samestep run` on node0, which lets ranks go on after a loss."""
    made = []

    def begin(words, *flags, **options):
        options = {"cwd": tmp_path, "stderr": subprocess.PIPE, "start_new_session": True, **options}
        made.append(lab.start("node0", [*RUN_COMMAND, *ELASTIC, *flags, *words], **options))
        return made[-1]

    yield begin
    for process in made:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE_S)


def result(process):
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("result ")]
    return line.split()[1], err


def undisturbed(tmp_path, *words):
    env = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP_")}
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
        env=env,
        cwd=tmp_path,
    )
    return done.stdout.split()[1]


@pytest.mark.parametrize(
    "planned",
    [
        ["2.0@4:mean"],
        pytest.param(["0.0@3:begin", "0.1@9:added"], marks=pytest.mark.slow),
        pytest.param(["0.0@4:mean", "1.0@4:mean", "2.0@9:begin"], marks=pytest.mark.slow),
        pytest.param(["2.0@3:begin", "3.0@3:change", "0.0@9:updated"], marks=pytest.mark.slow),
    ],
    ids=["one there", "rank 0 twice", "all here", "all there"],
)
def test_ranks_are_killed_on_both_hosts(run, tmp_path, planned):
    """They are started again where they were."""
    job = run(program(*TRAINING, planned, 8, 20.0, 0.03), "--hosts=node0:2,node1:2")
    found, err = result(job)
    assert found == undisturbed(tmp_path, *program(*TRAINING, []))
    assert all(f"rank {uid[0]} (pid " in err for uid in planned)


class Steps:
    """What the ranks of `train` note."""

    def __init__(self, folder):
        self._folder = folder

    def of(self, uid):
        path = self._folder / uid
        lines = path.read_text().splitlines(True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def await_step(self, job, uid, number):
        until = time.monotonic() + PATIENCE_S
        while not any(found.get("step", 0) >= number for found in self.of(uid)):
            assert job.poll() is None, job.communicate()
            assert time.monotonic() < until
            time.sleep(0.02)

    def await_size(self, job, uid, size):
        until = time.monotonic() + PATIENCE_S
        while not any(found.get("size") == size for found in self.of(uid)):
            assert job.poll() is None, job.communicate()
            assert time.monotonic() < until
            time.sleep(0.02)

    def first_with(self, uid, size):
        """When the first step of so many ranks ended."""
        return min(found["at"] for found in self.of(uid) if found.get("size") == size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "within"),
    [
        ("kill", KILLED_WITHIN_S),
        ("drop", SILENT_WITHIN_S),
        ("power_off", SILENT_WITHIN_S),
        ("power_off", 6.5),  # sooner than with the default, which takes 7 s at least
    ],
)
def test_ranks_go_on_soon_without_a_host(lab, run, tmp_path, how, within):
    steps = Steps(tmp_path)
    words = program("hosts/survive_hosts", "train", str(tmp_path))
    heartbeat = ["--env=SAMESTEP_HEARTBEAT=2"] if within < 7.0 else []
    job = run(words, "--hosts=node0:2,node1:1", "--max-restarts=0", *heartbeat)
    steps.await_step(job, "2.0", 5)
    struck_at = time.time()
    if how == "kill":
        os.kill(steps.of("2.0")[0]["pid"], signal.SIGKILL)
    else:
        getattr(lab, how)(1)
    found, err = result(job)
    taken = steps.first_with("0.0", 2) - struck_at
    print(f"{how}: the next step ended after {taken:.2f} s")
    assert found == undisturbed(tmp_path, *words)
    assert "2 of 3 ranks are left, the others go on" in err
    assert taken < within
    if how == "drop":
        assert_ended(lab, steps, "2.0", struck_at)


def training(folder, n_steps):
    """A program that takes its time, and one with the same result."""
    return [program("hosts/survive_hosts", "train", str(folder), n_steps, pause) for pause in (0.005, 0.0)]


def behind(steps, uid, size):
    """The error of a rank that was given up; it has ended no step of another size."""
    assert {found["size"] for found in steps.of(uid) if "step" in found} == {size}
    (error,) = [found["error"] for found in steps.of(uid) if "error" in found]
    return error


@pytest.mark.slow
@pytest.mark.parametrize("lab", [3], indirect=True)
@pytest.mark.parametrize(("n_each", "is_mended"), [(1, False), (2, True)])
def test_the_line_between_two_hosts_is_cut(lab, run, tmp_path, n_each, is_mended):
    """Both reach the launcher: the later one is given up, for good."""
    steps, n_left = Steps(tmp_path), 1 + n_each
    words, quick = training(tmp_path, 400 if is_mended else 60)
    job = run(words, f"--hosts=node0:1,node1:{n_each},node2:{n_each}")
    given_up = range(n_left, n_left + n_each)
    steps.await_step(job, f"{n_left}.0", 5)
    cut_at = time.time()
    lab.cut(1, 2)
    if is_mended:
        steps.await_size(job, "0.0", n_left)
        lab.mend(1, 2)
    found, err = result(job)
    taken = steps.first_with("0.0", n_left) - cut_at
    print(f"the next step ended after {taken:.2f} s")
    for rank in given_up:
        others = "rank 1" if n_each == 1 else "ranks 1-2"
        assert f"rank {rank} does not reach {others}: the others go on without it" in err
        assert "does not reach all of them" in behind(steps, f"{rank}.0", n_left + n_each)
        assert not steps.of(f"{rank}.1")  # nobody is started behind the line
    assert found == undisturbed(tmp_path, *quick)
    assert taken < SILENT_WITHIN_S + 15.0


@pytest.fixture
def join(lab, tmp_path):
    """Starts `samestep run --join` on a host."""
    made = []

    def begin(host, words):
        command = [*RUN_COMMAND, "--join=10.78.0.1:29400", "-n1", *words]
        made.append(lab.start(host, command, cwd=tmp_path, env=SECRET))
        return made[-1]

    yield begin
    for process in made:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["drop", "power_off"])
def test_a_rank_joins_from_another_host_which_is_lost(lab, run, join, tmp_path, how):
    steps = Steps(tmp_path)
    words, quick = training(tmp_path, 600)
    job = run(words, "-n2", *LISTENING, env=SECRET)
    steps.await_step(job, "1.0", 5)
    joined = join("node1", words)
    steps.await_step(job, "2.1", 5)
    struck_at = time.time()
    getattr(lab, how)(1)
    found, err = result(job)
    noted = [note["at"] for note in steps.of("0.0") if note.get("size") == 2 and note["at"] > struck_at]
    assert "rank 2 on node1 joins the job" in err and "2 of 3 ranks are left" in err
    assert min(noted) - struck_at < SILENT_WITHIN_S
    if how == "drop":
        said, _ = joined.communicate(timeout=PATIENCE_S)
        assert joined.returncode == 1
        assert "has ended, or its launcher cannot be reached, so the ranks here have ended, too" in said
    assert found == undisturbed(tmp_path, *quick)


@pytest.mark.slow
@pytest.mark.parametrize("lab", [3], indirect=True)
def test_a_newcomer_that_does_not_reach_all_is_not_taken_in(lab, run, join, tmp_path):
    steps = Steps(tmp_path)
    words, quick = training(tmp_path, 600)
    lab.cut(1, 2)
    job = run(words, "--hosts=node0:1,node1:1", *LISTENING, env=SECRET)
    steps.await_step(job, "1.0", 5)
    joined = join("node2", words)
    found, err = result(job)
    joined.communicate(timeout=PATIENCE_S)
    assert joined.returncode == 0  # as that of the job
    assert "rank 2 does not reach rank 1: the others go on without it" in err
    assert "does not reach all of them" in next(note["error"] for note in steps.of("2.1") if "error" in note)
    assert {note["size"] for note in steps.of("1.0") if "step" in note} == {2}
    assert found == undisturbed(tmp_path, *quick)


@pytest.mark.slow
def test_a_line_is_mended_after_its_ranks_were_given_up(lab, run, tmp_path):
    """They never touch the others again, and the job ends as it does without them."""
    steps = Steps(tmp_path)
    words, quick = training(tmp_path, 600)
    job = run(words, "--hosts=node0:2,node1:1")
    steps.await_step(job, "2.0", 5)
    lab.drop(1)
    steps.await_size(job, "0.0", 2)
    lab.restore(1)
    found, err = result(job)
    assert "rank 2 (pid " in err
    assert {found["size"] for found in steps.of("2.0") if "step" in found} == {3}
    assert found == undisturbed(tmp_path, *quick)


def assert_ended(lab, steps, uid, struck_at):
    """A rank behind a cut line, its agent and their shell end by themselves; neither reaches the launcher."""
    until = time.monotonic() + PATIENCE_S
    while lab.left():
        assert time.monotonic() < until
        time.sleep(0.05)
    print(f"behind the line all had ended after {time.time() - struck_at:.2f} s")
    assert time.time() - struck_at < SILENT_WITHIN_S + 10.0
    assert all(found.get("size", 3) == 3 for found in steps.of(uid))


@pytest.mark.slow
@pytest.mark.parametrize(("act", "uid"), [("meet", "1.0"), ("meet", "1.1"), ("ask", "1.0")])
def test_a_rank_behind_a_cut_line_says_that_it_ends(lab, act, uid):
    """It has left its epoch, or is a newcomer, or asks whether there is one."""
    pipes = {"stdin": subprocess.PIPE, "env": SECRET}
    file = "hosts/survive_hosts"
    store = lab.start("node0", [sys.executable, *program(file, "keep_store")], **pipes)
    port = json.loads(store.stdout.readline())["port"]
    words = program(file, "wait_for_members", f"10.78.0.1:{port}", uid, act)
    rank = lab.start("node1", [sys.executable, *words], **pipes)
    assert json.loads(rank.stdout.readline()) == {"ready": True}
    cut_at = time.time()
    lab.drop(1)
    rank.stdin.write("\n")
    rank.stdin.flush()
    found = json.loads(rank.stdout.readline())
    assert "the launcher, which says who goes on, has ended or cannot be reached" in found["error"]
    assert found["at"] - cut_at < SILENT_WITHIN_S
    for process in (rank, store):
        process.communicate("", timeout=PATIENCE_S)


def test_a_launcher_whose_name_nobody_knows(lab, run, tmp_path):
    lab.run("node0", "hostname nameless")
    job = run(program(*TRAINING, ["1.0@4:mean"]), "--hosts=10.78.0.1:1,node1:1")
    found, _ = result(job)
    assert found == undisturbed(tmp_path, *program(*TRAINING, []))


def test_a_job_of_one_host_listens_to_no_other(run):
    listening = program("hosts/survive_hosts", "listeners")
    for flags in (["-n2"], ["--hosts=node0:2"]):
        out, err = run(listening, *flags).communicate(timeout=PATIENCE_S)
        assert out.splitlines() == ["listeners"], out + err

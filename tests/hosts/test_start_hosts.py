"""The ways to start ranks on several hosts."""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import slurm
from lab import PATIENCE_S, PRELUDE

TELLS = """
world = ss.initialize({backend}timeout=60)
total = world.allreduce(np.full(1000, world.rank + 1.0))[7]
variables = [os.environ.get(name) for name in ("LOCAL_RANK", "GROUP_RANK", "WITH")]
tell(rank=world.rank, host=os.uname().nodename, total=total, place=[world.local_rank, world.node_rank],
     variables=variables, words=sys.argv[1:])
ss.finalize()
"""


@pytest.fixture
def run(lab, tmp_path):
    """Starts `samestep run` on node0, or another host."""
    made = []

    def begin(script, *words, host="node0", arguments=(), **options):
        program = tmp_path / f"program{len(made)}.py"
        program.write_text(PRELUDE + script)
        command = [sys.executable, "-m", "samestep", "run", "--raw", *words]
        if "-m" not in words:
            command += [str(program), *arguments]
        made.append(lab.start(host, command, cwd=tmp_path, start_new_session=True, **options))
        return made[-1]

    yield begin
    left = lab.left()
    for process in made:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    assert left == []


def ends(process, code=0):
    """What it has printed."""
    text, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, text
    return text


def told(text):
    return sorted((json.loads(line) for line in text.splitlines()), key=lambda found: found["rank"])


def test_by_remote_shell(run):
    found = told(
        ends(
            run(
                TELLS.format(backend="'native', "),
                "--hosts=node0:1,node1:2",
                "--env=WITH=a b'c",
                arguments=["x y", "'$z"],
            )
        )
    )
    assert [f["host"] for f in found] == ["node0", "node1", "node1"]
    assert [f["place"] for f in found] == [[0, 0], [0, 1], [1, 1]]
    assert [f["variables"] for f in found] == [["0", "0", "a b'c"], ["0", "1", "a b'c"], ["1", "1", "a b'c"]]
    assert [f["total"] for f in found] == [6.0] * 3
    assert found[2]["words"] == ["x y", "'$z"]


def test_by_mpirun(run):
    found = told(ends(run(TELLS.format(backend="'mpi', "), "--mpi", "--hosts=node0:1,node1:2")))
    assert [f["host"] for f in found] == ["node0", "node1", "node1"]
    assert [f["place"] for f in found] == [[0, 0], [0, 1], [1, 1]]
    assert [f["total"] for f in found] == [6.0] * 3


def test_a_run_on_each_host(run):
    flags = ["-n", "2", "--nnodes=2", "--master-addr=node0"]
    runs = [
        run(TELLS.format(backend=""), *flags, f"--node-rank={i}", host=f"node{i}", env={"MASTER_PORT": ""})
        for i in range(2)
    ]
    found = told("".join(ends(process) for process in runs))
    assert [f["host"] for f in found] == ["node0", "node0", "node1", "node1"]
    assert [f["place"] for f in found] == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert [f["total"] for f in found] == [10.0] * 4


def test_a_failure_on_another_host_ends_all_and_is_the_exit_code(run):
    script = """
world = ss.initialize("native", timeout=60)
world.barrier()
if world.rank == 2:
    print("out of luck", file=sys.stderr)
    os._exit(7)
time.sleep(1000)
"""
    text = ends(run(script, "--hosts=node0:1,node1:2"), 7)
    assert "samestep: root cause: rank 2 " in text
    assert "on node1" in text
    assert "out of luck" in text.partition("root cause")[2]


def test_a_host_that_cannot_be_reached_is_named(run):
    text = ends(
        run("", "--hosts=node0:1,node1:1", "--rsh", "sh -c 'echo $0: no such host >&2; exit 255'"), 255
    )
    assert "node1: no such host" in text
    assert "root cause: sh to node1" in text


def test_no_remote_shell_is_an_error_before_anything_starts(run):
    text = ends(run("", "--hosts=node0:1,node1:1", "--rsh", "rsh-of-nobody"), 2)
    assert "there is no rsh-of-nobody in PATH" in text


def test_by_srun(lab, tmp_path):
    if reason := slurm.missing():
        pytest.skip(reason)
    program = tmp_path / "program.py"
    program.write_text(PRELUDE + TELLS.format(backend=""))
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        cluster = slurm.Slurm(lab, 2, Path(folder))
        try:
            words = ["-N", "2", "-n", "3", "--distribution=block"]
            found = told(ends(cluster.srun(*words, sys.executable, str(program), "word")))
        finally:
            cluster.close()
    assert [f["host"] for f in found] == ["node0", "node0", "node1"]
    assert [f["place"] for f in found] == [[0, 0], [1, 0], [0, 1]]
    assert [f["total"] for f in found] == [6.0] * 3
    assert found[0]["words"] == ["word"]


def test_every_rank_tells_where_it_is(run, tmp_path):
    text = ends(run("", "--hosts=node0:1,node1:2", "-m", "samestep", "doctor", "--run"))
    header, *rows = text.splitlines()
    assert header.split()[:2] == ["rank", "host"]
    found = [dict(zip(header.split(), row.split(), strict=True)) for row in rows]
    assert [f["host"] for f in found] == ["node0", "node1", "node1"]
    assert [f["local_rank"] for f in found] == ["0", "0", "1"]
    assert [(f["address"], f["interface"]) for f in found] == [
        ("10.78.0.1", "eth0"),
        ("10.78.0.2", "eth0"),
        ("10.78.0.2", "eth0"),
    ]
    assert {(f["launcher"], f["backend"], f["engine"]) for f in found} == {
        ("samestep", "NativeBackend", "hier")
    }


WAITS = """
world = ss.initialize("native", timeout=60)
world.barrier()
tell(rank=world.rank)
try:
    world.barrier() if world.rank else time.sleep(1000)
except ss.PeerLostError:
    time.sleep(1000)
"""


def test_ranks_of_other_hosts_end_with_a_launcher_that_is_killed(run, lab):
    process = run(WAITS, "--hosts=node0:1,node1:2")
    for _ in range(3):
        process.stdout.readline()
    assert len(lab.left()) == 1
    process.kill()
    deadline = time.monotonic() + PATIENCE_S
    while lab.left():
        assert time.monotonic() < deadline
        time.sleep(0.02)


LOSES = """
world = ss.initialize("native", timeout=60)
world.barrier()
tell(rank=world.rank)
world.barrier() if world.rank == 0 else time.sleep(1000)
"""


def test_a_host_without_power_ends_the_run(run, lab):
    process = run(LOSES, "--hosts=node0:1,node1:2")
    for _ in range(3):
        process.stdout.readline()
    lab.power_off(1)
    text = ends(process, 1)
    assert "root cause: rank 1 " in text or "root cause: rank 2 " in text
    assert "node1" in text

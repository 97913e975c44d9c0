"""The ways to start ranks on several hosts."""

import json
import os
import signal
import sys
import time

import pytest
import slurm
from lab import PATIENCE_S
from running import RUN_COMMAND, program

REDUCE = "hosts/start_hosts", "reduce_once"


@pytest.fixture
def run(lab, tmp_path):
    """Starts `samestep run` on node0, or another host."""
    made = []

    def begin(words, *flags, host="node0", **options):
        command = [*RUN_COMMAND, "--raw", *flags, *words]
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


def reports(text):
    return sorted((json.loads(line) for line in text.splitlines()), key=lambda found: found["rank"])


def test_by_remote_shell(run):
    found = reports(
        ends(
            run(
                program(*REDUCE, "native", "x y", "'$z"),
                "--hosts=node0:1,node1:2",
                "--env=WITH=a b'c",
            )
        )
    )
    assert [f["host"] for f in found] == ["node0", "node1", "node1"]
    assert [f["place"] for f in found] == [[0, 0], [0, 1], [1, 1]]
    assert [f["variables"] for f in found] == [["0", "0", "a b'c"], ["0", "1", "a b'c"], ["1", "1", "a b'c"]]
    assert [f["total"] for f in found] == [6.0] * 3
    assert found[2]["words"] == ["x y", "'$z"]


def test_by_mpirun(run):
    found = reports(ends(run(program(*REDUCE, "mpi"), "--mpi", "--hosts=node0:1,node1:2")))
    assert [f["host"] for f in found] == ["node0", "node1", "node1"]
    assert [f["place"] for f in found] == [[0, 0], [0, 1], [1, 1]]
    assert [f["total"] for f in found] == [6.0] * 3


def test_a_run_on_each_host(run):
    flags = ["-n", "2", "--nnodes=2", "--master-addr=node0"]
    runs = [
        run(
            program(*REDUCE, None),
            *flags,
            f"--node-rank={i}",
            host=f"node{i}",
            env={"MASTER_PORT": "", "SAMESTEP_SECRET": "x"},
        )
        for i in range(2)
    ]
    found = reports("".join(ends(process) for process in runs))
    assert [f["host"] for f in found] == ["node0", "node0", "node1", "node1"]
    assert [f["place"] for f in found] == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert [f["total"] for f in found] == [10.0] * 4


@pytest.fixture
def nodes(run, tmp_path):
    """One run on each of two hosts, with home folders of these names, and what their ranks have printed."""

    def begin(*homes, flags=()):
        runs = [
            run(
                program("hosts/start_hosts", "gather_objects"),
                *("-n", "1", "--nnodes=2", "--master-addr=node0", f"--node-rank={i}", *flags),
                host=f"node{i}",
                env={"MASTER_PORT": "", "HOME": str(tmp_path / home), "XDG_CONFIG_HOME": ""},
            )
            for i, home in enumerate(homes)
        ]
        return [ends(process) for process in runs]

    return begin


def own_lines(texts):
    return reports("".join(line for text in texts for line in text.splitlines(True) if line.startswith("{")))


@pytest.mark.parametrize(
    ("homes", "flags"), [(["home", "home"], []), (["a", "b"], ["--secret-file=common"])], ids=["home", "file"]
)
def test_nodes_that_share_a_file_share_a_secret(nodes, homes, flags, tmp_path):
    texts = nodes(*homes, flags=flags)
    assert own_lines(texts) == [{"rank": rank, "gathered": ["0", "1"]} for rank in range(2)]
    assert "without a secret" not in "".join(texts)
    assert "".join(texts).count("holds the secret of jobs of several nodes from now on") == 1
    assert (
        tmp_path / ("common" if flags else "home/.config/samestep/secret")
    ).stat().st_mode & 0o777 == 0o600


def test_nodes_with_different_secrets_do_not_meet_and_say_what_to_do(nodes):
    one, other = own_lines(nodes("a", "b"))
    assert "rank 1 of 2 did not join" in one["error"]
    assert "SAMESTEP_SECRET differs" in other["error"]
    assert "~/.config/samestep/secret of each node" in other["error"]


def test_nodes_without_a_home_folder_are_warned_and_take_no_objects(nodes, tmp_path):
    (tmp_path / "file").touch()
    texts = nodes("file", "file")
    assert all("warning: the job has no secret" in text for text in texts)
    assert all("set the same SAMESTEP_SECRET on all nodes" in text for text in texts)
    assert all("objects travel by pickle" in found["error"] for found in own_lines(texts))


def test_a_failure_on_another_host_ends_all_and_is_the_exit_code(run):
    text = ends(run(program("hosts/start_hosts", "fail_on_rank_2"), "--hosts=node0:1,node1:2"), 7)
    assert "samestep: root cause: rank 2 " in text
    assert "on node1" in text
    assert text.count("out of luck") == 1


def test_a_host_that_cannot_be_reached_is_named(run):
    text = ends(
        run(
            ["-m", "this"], "--hosts=node0:1,node1:1", "--rsh", "sh -c 'echo $0: no such host >&2; exit 255'"
        ),
        255,
    )
    assert "node1: no such host" in text
    assert "root cause: sh to node1" in text


def test_no_remote_shell_is_an_error_before_anything_starts(run):
    text = ends(run(["-m", "this"], "--hosts=node0:1,node1:1", "--rsh", "rsh-of-nobody"), 2)
    assert "there is no rsh-of-nobody in PATH" in text


def test_by_srun(lab):
    with slurm.cluster(lab) as cluster:
        words = ["-N", "2", "-n", "3", "--distribution=block"]
        text = ends(cluster.srun(*words, sys.executable, *program(*REDUCE, None, "word")))
    assert text.count("met over the network without a secret") == 1  # srun makes none
    found = reports("".join(line for line in text.splitlines(keepends=True) if line.startswith("{")))
    assert [f["host"] for f in found] == ["node0", "node0", "node1"]
    assert [f["place"] for f in found] == [[0, 0], [1, 0], [0, 1]]
    assert [f["total"] for f in found] == [6.0] * 3
    assert found[0]["words"] == ["word"]


def test_every_rank_reports_where_it_is(run):
    text = ends(run(["-m", "samestep", "doctor", "--run"], "--hosts=node0:1,node1:2"))
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
    assert {(f["launcher"], f["backend"], f["transport"]) for f in found} == {
        ("samestep", "NativeBackend", "hierarchical")
    }


def test_ranks_of_other_hosts_end_with_a_launcher_that_is_killed(run, lab):
    process = run(program("hosts/start_hosts", "wait_after_a_loss"), "--hosts=node0:1,node1:2")
    for _ in range(3):
        process.stdout.readline()
    assert len(lab.left()) == 1
    process.kill()
    deadline = time.monotonic() + PATIENCE_S
    while lab.left():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_host_without_power_ends_the_run(run, lab):
    process = run(program("hosts/start_hosts", "wait_on_rank_0"), "--hosts=node0:1,node1:2")
    for _ in range(3):
        process.stdout.readline()
    lab.power_off(1)
    text = ends(process, 1)
    assert "root cause: rank 1 " in text or "root cause: rank 2 " in text
    assert "node1" in text

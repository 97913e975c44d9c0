"""`python -m samestep.distributed.launch`: flags, what the ranks get, files, and how it ends."""

import json
import re

import pytest
from dist_jobs import DistributedJob, launch
from running import program, script
from samestep._util.cpus import usable_cpus
from samestep.distributed.launch import parse
from samestep.launch import network

PRINT_VARIABLES = script("distributed/print_variables")


@pytest.fixture(autouse=True)
def folder_of_settings(tmp_path, monkeypatch):
    """Where launchers of several nodes put their secret."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["t.py"], ["py", "-u", "t.py", "--local_rank=3"]),
        (
            ["t.py", "--nnodes", "9", "-m", "--"],
            ["py", "-u", "t.py", "--local_rank=3", "--nnodes", "9", "-m", "--"],
        ),
        (["--use_env", "t.py", "a"], ["py", "-u", "t.py", "a"]),
        (["--use_env=TRUE", "t.py"], ["py", "-u", "t.py"]),
        (["--use-env=false", "t.py"], ["py", "-u", "t.py", "--local_rank=3"]),
        (["--local_rank_style", "dash", "t.py"], ["py", "-u", "t.py", "--local-rank=3"]),
        (["--local-rank-style=underscore", "t.py"], ["py", "-u", "t.py", "--local_rank=3"]),
        (["-m", "pkg.train", "x"], ["py", "-u", "-m", "pkg.train", "--local_rank=3", "x"]),
        (["--module", "pkg.train"], ["py", "-u", "-m", "pkg.train", "--local_rank=3"]),
        (["--use_env", "--no_python", "./prog", "x"], ["./prog", "x"]),
        (["--nproc_per_node", "5", "t.py"], ["py", "-u", "t.py", "--local_rank=3"]),
    ],
)
def test_command_of_a_rank(words, argv):
    assert parse(words).rank_argv("py", 3) == argv


def test_values_and_defaults():
    one = parse(["t.py"])
    assert (one.n_ranks, one.n_nodes, one.node_rank, one.first_rank) == (1, 1, 0, 0)
    assert (one.master_addr, one.master_port, one.logs, one.shown) == ("127.0.0.1", None, None, (1, 2))
    two = parse(["--nnodes=3", "--node_rank", "2", "--nproc-per-node=4", "--master_addr", "h", "t.py"])
    assert (two.n_ranks, two.n_nodes, two.node_rank, two.first_rank) == (4, 3, 2, 8)
    assert (two.master_addr, two.master_port) == ("h", 29500)
    assert parse(["--nnodes", "2", "--master-port", "7", "t.py"]).master_port == 7
    assert parse(["--logdir", "d", "t.py"]).log_file(0, 2) == "node_0_local_rank_0_stderr"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--nproc_per_node", "2"],
        ["--nproc_per_node", "0", "t.py"],
        ["--nnodes", "-1", "t.py"],
        ["--nnodes", "2", "--node_rank", "2", "t.py"],
        ["--node_rank", "-1", "t.py"],
        ["--master_port", "x", "t.py"],
        ["--use_env=maybe", "t.py"],
        ["--no_python", "prog"],
        ["--use_env", "--no_python", "-m", "prog"],
        ["--local_rank_style", "camel", "t.py"],
        ["--frobnicate", "t.py"],
    ],
    ids=" ".join,
)
def test_wrong_flags_exit_with_2_and_a_usage_line(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert "usage: python -m samestep.distributed.launch" in capsys.readouterr().err


def printed(ended):
    assert ended.code == 0, ended.err
    assert ended.left == []
    found = [json.loads(line) for line in ended.out.splitlines()]
    return sorted(found, key=lambda one: int(one["RANK"]))


def test_what_ranks_of_one_node_get(tmp_path):
    one, two = printed(
        launch(tmp_path, [PRINT_VARIABLES, "--lr", "0.1", "--nnodes", "4"], "--nproc_per_node=2")
    )
    assert one["argv"] == ["--local_rank=0", "--lr", "0.1", "--nnodes", "4"]
    assert two["argv"][0] == "--local_rank=1"
    assert (one["RANK"], two["RANK"], two["LOCAL_RANK"], two["LOCAL_WORLD_SIZE"]) == ("0", "1", "1", "2")
    assert (two["WORLD_SIZE"], two["GROUP_RANK"], two["OMP_NUM_THREADS"]) == (
        "2",
        "0",
        str(max(1, usable_cpus() // 2)),
    )
    assert two["MASTER_ADDR"] == "127.0.0.1"
    assert int(one["MASTER_PORT"]) == int(two["MASTER_PORT"]) > 0


def test_what_ranks_of_another_node_get(tmp_path):
    flags = ["--nnodes=3", "--node_rank=2", "--nproc_per_node=2", "--master_addr=a", "--use_env"]
    one, two = printed(launch(tmp_path, [PRINT_VARIABLES], *flags, env={"OMP_NUM_THREADS": "5"}))
    assert one["argv"] == []
    assert (one["RANK"], two["RANK"], two["LOCAL_RANK"], two["WORLD_SIZE"]) == ("4", "5", "1", "6")
    assert (one["GROUP_RANK"], one["MASTER_ADDR"], one["MASTER_PORT"]) == ("2", "a", "29500")
    assert one["OMP_NUM_THREADS"] == "5"


def test_every_job_has_a_secret(tmp_path, monkeypatch):
    """Of its own on one node; on several, that of the user, which all launchers of a shared home find."""
    monkeypatch.delenv("SAMESTEP_SECRET", raising=False)
    jobs = [printed(launch(tmp_path, [PRINT_VARIABLES], "--nproc_per_node=2")) for _ in range(2)]
    jobs += [
        printed(launch(tmp_path, [PRINT_VARIABLES], "--nnodes=2", f"--node_rank={r}", "--master_addr=a"))
        for r in range(2)
    ]
    found = [{rank["SAMESTEP_SECRET"] for rank in job} for job in jobs]
    assert all(re.fullmatch("[0-9a-f]{32,}", secret) for secrets in found for secret in secrets), found
    assert [len(secrets) for secrets in found] == [1, 1, 1, 1]
    assert found[2] == found[3]
    assert len(set().union(*found)) == 3


def test_two_launchers_make_one_job(tmp_path):
    with network.reserve_port() as holder:
        flags = ["--nnodes=2", f"--master_port={holder.getsockname()[1]}", "--nproc_per_node=1", "--use_env"]
        start = ["-m", "samestep.distributed.launch", *flags]
        jobs = [
            DistributedJob(tmp_path, *start, f"--node_rank={r}", *program("distributed/launched", "reduce"))
            for r in range(2)
        ]
        ends = [job.wait() for job in jobs]
    assert [ended.code for ended in ends] == [0, 0], ends
    assert [ended.out for ended in ends] == ["0 2 1.0\n", "1 2 1.0\n"]


def test_logdir(tmp_path):
    writes = program("distributed/launched", "write_to_both_outputs")
    ended = launch(tmp_path, writes, "--nproc_per_node=2", "--logdir", "new/logs", "--use_env")
    assert (ended.code, ended.out) == (0, "")
    assert sorted(ended.err.splitlines()) == ["err 0", "err 1"]
    logs = {path.name: path.read_text() for path in (tmp_path / "new" / "logs").iterdir()}
    assert logs == {
        f"node_0_local_rank_{r}{end}": f"{name} {r}\n"
        for r in range(2)
        for name, end in [("out", ""), ("err", "_stderr")]
    }


def test_the_first_failure_ends_all(tmp_path):
    exits = program("distributed/launched", "exit_while_others_reduce")
    ended = launch(tmp_path, exits, "--nproc_per_node=2", "--use_env")
    assert ended.code == 7
    assert ended.left == []
    assert "samestep: root cause: rank 1 (pid " in ended.err
    assert "exit code 7" in ended.err


def test_ranks_in_reports_are_those_of_the_whole_job(tmp_path):
    ended = launch(
        tmp_path, program("distributed/launched", "exit_with_3"), "--nnodes=4", "--node_rank=3", "--use_env"
    )
    assert ended.code == 3
    assert "root cause: rank 3 (pid " in ended.err


def test_a_script_that_is_not_there(tmp_path):
    ended = launch(tmp_path, ["train.py"], "--nproc_per_node=2")
    assert ended.code == 2
    assert "samestep.distributed.launch: there is no file train.py" in ended.err

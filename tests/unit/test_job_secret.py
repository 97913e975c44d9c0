"""Where the launchers of a job have its secret from."""

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from samestep.launch.arguments import Options
from samestep.launch.job_secret import default_file, job_secret
from samestep.launch.mpirun import LaunchError

NODE = Options(1, "x", n_nodes=2)
NAME = "SAMESTEP_SECRET"


@pytest.fixture
def env(tmp_path):
    return {"HOME": str(tmp_path / "home")}


@pytest.fixture
def said():
    return []


def test_one_launcher_makes_a_new_one_each_time(env, said):
    first, second = (job_secret(Options(1, "x"), env, said.append) for _ in range(2))
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert first != second
    assert not said
    assert not os.path.exists(env["HOME"])


@pytest.mark.parametrize("how", [{"listen": 0}, {"join": ("a", 29400)}])
def test_launchers_of_one_job_share_the_file_as_nodes_do(how, env, said, tmp_path):
    options = Options(1, "x", **how)
    assert job_secret(options, env, said.append) == job_secret(NODE, env, said.append)
    assert job_secret(options, {NAME: "given", **env}, said.append) == "given"
    for without in ({NAME: "", **env}, {"HOME": "/dev/null"}):
        with pytest.raises(
            LaunchError, match="--listen and --join need a secret that both launchers know; set the"
        ):
            job_secret(options, without, said.append)


def test_what_is_given_comes_first(env, said, tmp_path):
    file = tmp_path / "file"
    file.touch(0o600)
    file.write_text("of the file\n")
    given = {NAME: "of the shell", **env}
    for n_nodes in (1, 2):
        with_file = Options(1, "x", n_nodes=n_nodes, secret_file=str(file))
        with_both = Options(1, "x", n_nodes=n_nodes, secret_file=str(file), env={NAME: "of --env"})
        assert job_secret(Options(1, "x", n_nodes=n_nodes), given, said.append) == "of the shell"
        assert job_secret(Options(1, "x", n_nodes=n_nodes), {NAME: "", **env}, said.append) == ""
        assert job_secret(with_file, given, said.append) == "of the file"
        assert job_secret(with_both, given, said.append) == "of --env"
    assert not said
    assert not os.path.exists(env["HOME"])


def test_launchers_of_several_nodes_agree_in_any_order(env, said):
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: job_secret(NODE, env, said.append), range(32)))
    assert len(found) == 1
    assert re.fullmatch("[0-9a-f]{64}", found.pop())
    path = default_file(env)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(os.path.dirname(path)) == ["secret"]
    assert len(said) == 1
    assert path in said[0]
    assert "the same SAMESTEP_SECRET" in said[0]


def link(path):
    os.symlink("/etc/hostname", path)


def open_to_others(path):
    path.write_text("secret")
    path.chmod(0o640)


def of_another_user(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    path.touch(0o600)
    os.chown(path, 12345, -1)


def empty(path):
    path.touch(0o600)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (link, "cannot hold the secret of the job: Too many levels of symbolic links"),
        (os.mkdir, "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (open_to_others, "chmod 600"),
        (of_another_user, "belongs to another user"),
        (empty, "is empty"),
    ],
)
def test_files_that_hold_no_secret_are_refused(make, why, env, said, tmp_path):
    path = tmp_path / "file"
    make(path)
    with pytest.raises(LaunchError, match=why):
        job_secret(Options(1, "x", n_nodes=2, secret_file=str(path)), env, said.append)
    assert not said


def test_without_a_home_folder_the_risk_and_the_cure_are_told(said):
    assert job_secret(NODE, {"HOME": "/dev/null"}, said.append) == ""
    assert "anybody on the network may join" in said[0]
    assert "set the same SAMESTEP_SECRET on all nodes" in said[0]

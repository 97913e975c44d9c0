"""An unchanged script, under each launcher: torch finds the backend by the package's entry point."""

import os
import re
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "ddp_samestep.py"
GROUP = "torch.backends"


@pytest.fixture
def environment(tmp_path):
    """For child processes: with the entry points of pyproject.toml, also where the package runs from its tree."""
    env = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    env["OMP_NUM_THREADS"] = "1"
    if any(point.name == "samestep" for point in entry_points(group=GROUP)):
        return env
    facts = tmp_path / "samestep_in_its_tree-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: samestep-in-its-tree\nVersion: 0\n")
    lines = re.findall(rf'entry-points."{GROUP}"\]\n(\w+) = "([^"]+)"', (ROOT / "pyproject.toml").read_text())
    (facts / "entry_points.txt").write_text(
        f"[{GROUP}]\n" + "".join(f"{name} = {target}\n" for name, target in lines)
    )
    return env | {"PYTHONPATH": os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])}


def by_samestep(n, script):
    return [sys.executable, "-m", "samestep", "run", "--raw", "-n", str(n), script], {}


def by_torchrun(n, script):
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(n),
        script,
    ], {}


def by_mpirun(n, script):
    from samestep.launch import mpirun

    try:
        return mpirun.command(n, [sys.executable, script])
    except mpirun.LaunchError as error:
        pytest.skip(str(error))


def end_of(argv, env, tmp_path):
    process = subprocess.Popen(
        argv,
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # the launchers end their ranks
        printed, _ = process.communicate(timeout=30)
        pytest.fail(f"it did not end: {printed}")
    return process.returncode, printed


@pytest.mark.parametrize("way", [by_samestep, by_torchrun, by_mpirun])
def test_the_example_learns(way, environment, tmp_path):
    if not SCRIPT.exists():
        pytest.skip("the examples are not part of this tree")
    argv, extra = way(2, str(SCRIPT))
    code, printed = end_of(argv, environment | extra, tmp_path)
    assert code == 0, printed
    assert "bitwise equal on all ranks: True" in printed
    assert float(re.findall(r"ranks 2, last loss (\S+)", printed)[0]) < 0.02


CAREFREE = """
import os, sys, torch, torch.distributed as dist
assert "samestep" not in sys.modules  # the entry point costs nothing
dist.init_process_group("samestep")
rank = dist.get_rank()
got = torch.empty(100_000)
if rank == 0:
    dist.isend(torch.full((100_000,), 7.0), 1)  # neither waited for nor kept
else:
    dist.recv(got, 0)
    assert (got == 7).all()
    print("arrived", file=sys.stderr)
"""


def test_who_does_not_say_goodbye_delivers_its_messages(environment, tmp_path):
    script = tmp_path / "carefree.py"
    script.write_text(CAREFREE)
    argv, extra = by_samestep(2, str(script))
    code, printed = end_of(argv, environment | extra, tmp_path)
    assert code == 0, printed
    assert "arrived" in printed
    assert "Traceback" not in printed


@pytest.mark.ranks(3, dies={1}, backends=["native"])
def test_a_rank_that_dies_is_named(group, over):
    import samestep as ss

    with over("samestep") as dist:
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ss.PeerLostError, match="rank 1") as caught:
            dist.all_reduce(torch.ones(5))
        assert isinstance(caught.value, dist.DistBackendError)


@pytest.mark.parametrize(
    "launcher",
    [
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"},
    ],
    ids=["mpirun", "srun"],
)
def test_ranks_whose_launcher_does_not_speak_to_this_mpi_do_not_train_alone(environment, launcher):
    script = "import torch.distributed as dist; dist.init_process_group('samestep')"
    env = {k: v for k, v in environment.items() if not k.startswith(("OMPI_", "PMI", "PMIX_", "SLURM_"))}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=env | launcher | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode != 0
    assert "started 2 ranks, but the world of the loaded MPI library has 1" in ended.stderr, ended.stderr

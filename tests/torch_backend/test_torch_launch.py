"""An unchanged script, under each launcher: torch finds the backend by the package's entry point."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from running import RUN_COMMAND, program
from torch_versions import finds_backends

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "ddp_samestep.py"


def by_samestep(n, *words):
    return [*RUN_COMMAND, "--raw", "-n", str(n), *words], {}


def by_torchrun(n, *words):
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(n),
        *words,
    ], {}


def by_mpirun(n, *words):
    from samestep.launch import mpirun

    try:
        return mpirun.command(n, [sys.executable, *words])
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


@finds_backends
@pytest.mark.parametrize("launcher", [by_samestep, by_torchrun, by_mpirun])
def test_the_example_learns(launcher, environment, tmp_path):
    if not SCRIPT.exists():
        pytest.skip("the examples are not part of this tree")
    argv, extra = launcher(2, str(SCRIPT))
    code, printed = end_of(argv, environment | extra, tmp_path)
    assert code == 0, printed
    assert "bitwise equal on all ranks: True" in printed
    assert float(re.findall(r"ranks 2, last loss (\S+)", printed)[0]) < 0.02


@finds_backends
def test_who_does_not_say_goodbye_delivers_its_messages(environment, tmp_path):
    argv, extra = by_samestep(2, *program("torch_backend/collectives", "send_without_waiting"))
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


def of_no_launcher(environment):
    ours = ("OMPI_", "PMI", "PMIX_", "SLURM_", "LOCAL_")
    return {k: v for k, v in environment.items() if not k.startswith(ours)} | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


OPENMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}


@finds_backends
@pytest.mark.parametrize(
    ("backend", "launcher", "text"),
    [
        ("samestep", OPENMPI, "started 2 ranks, but the world of the loaded MPI library has 1"),
        (
            "samestep",
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"},
            "names no hosts",
        ),
        ("gloo", OPENMPI, "environment variable RANK expected"),
    ],
    ids=["mpirun of another MPI", "srun without hosts", "gloo as ever"],
)
def test_ranks_that_cannot_meet_do_not_train_alone(environment, backend, launcher, text):
    script = f"import torch.distributed as dist; dist.init_process_group('{backend}')"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=of_no_launcher(environment) | launcher,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode != 0
    assert text in ended.stderr, ended.stderr


def free_job():
    """The number of a job of Slurm whose port is free."""
    from samestep._util import launchers

    for job in range(os.getpid(), os.getpid() + 1000):
        of = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost"}
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", launchers.slurm_meeting(of)[1]))
            return of
    raise AssertionError("no port is free")


@finds_backends
def test_tasks_of_srun_meet_at_the_first_host_of_their_step(environment):
    env = of_no_launcher(environment) | free_job() | {"SLURM_STEP_NUM_TASKS": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *program("torch_backend/collectives", "reduce_and_print_variables")],
            env=env | {"SLURM_PROCID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in ended] == ["0 2 0 2 localhost\n", "1 2 1 2 localhost\n"], ended

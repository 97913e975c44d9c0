"""Jobs of Slurm that go on after a loss, or that stop and are queued again, with the bits of an undisturbed run."""

import json
import os
import re
import shlex
import subprocess
import sys
import time

import pytest
import slurm
from lab import PATIENCE_S
from running import RUN_COMMAND, script

pytestmark = pytest.mark.slow
TRAINING = script("survive/interrupted")
SECRET = {"SAMESTEP_SECRET": "of this test"}
BY_SRUN = """sh -c 'exec srun -N1 -n1 --overlap --no-kill -w "$0" sh -c "$*"'"""
BATCH = """#!/bin/bash
srun -n 3 {command}
code=$?
echo "code $code"
if [ $code = 143 ]; then scontrol requeue $SLURM_JOB_ID; fi
"""


def training(path="", pause=0.0, planned=()):
    return [TRAINING, *map(json.dumps, [path, planned, 8, None, pause])]


@pytest.fixture(scope="module")
def whole():
    env = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP_")}
    command = [sys.executable, *training()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=env)
    return results(done.stdout)


def results(text):
    """Parameters and number of steps, which all ranks print."""
    return {tuple(found) for found in re.findall(r"^result (\w+) (\d+)", text, re.M)}


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["a rank is killed", "a node loses power"])
def test_an_allocation_goes_on(lab, whole, how):
    with slurm.cluster(lab) as cluster:
        words = ["--raw", "--min-ranks=1", "--hosts=node0:2,node1:1", f"--rsh={BY_SRUN}"]
        planned = ["2@5:mean:SIGKILL"] if how == "a rank is killed" else []
        program = training(pause=0.1, planned=planned)
        job = cluster.start("salloc", "--no-kill", "-N2", *RUN_COMMAND, *words, *program, **SECRET)
        text = ""
        while "began 2\n" not in text:
            text += job.stdout.readline()
        if not planned:
            lab.power_off(1)
        text += job.communicate(timeout=PATIENCE_S)[0]
        assert job.returncode == 0, text
        assert "2 of 3 ranks are left, the others go on" in text
        assert results(text) == whole
        assert text.count("result ") == 2


def test_a_job_is_queued_again(lab, whole, tmp_path):
    """As by `--signal=USR1@120`, which Slurm sends so many seconds before the time limit, or up to a minute earlier."""
    batch, output = tmp_path / "batch.sh", tmp_path / "output"
    output.touch()
    command = shlex.join([sys.executable, *training(str(tmp_path / "state.npz"), pause=0.1)])
    batch.write_text(BATCH.format(command=command))
    with slurm.cluster(lab) as cluster:

        def ask(*argv):
            done = cluster.start(*argv, **SECRET)
            text = done.communicate(timeout=PATIENCE_S)[0]
            assert done.returncode == 0, text
            return text

        words = ["--requeue", "-N2", "--open-mode=append", f"--output={output}"]
        number = ask("sbatch", *words, str(batch)).split()[-1]
        until(lambda: output.read_text().count("began") == 3)
        ask("scancel", "--signal=USR1", number)
        until(lambda: "code 143" in output.read_text())
        assert not results(output.read_text())
        until(lambda: "PENDING" in ask("squeue", "-h", "-j", number, "-o", "%T"))
        ask("scontrol", "update", f"JobId={number}", "StartTime=now")  # else it waits for two minutes
        until(lambda: "code 0" in output.read_text())
        assert results(output.read_text()) == whole
        assert ask("squeue", "-h", "-o", "%T").strip() in ("", "COMPLETING")


def test_tasks_of_srun_end_after_a_loss(lab):
    """Also with --no-kill, which is about nodes."""
    with slurm.cluster(lab) as cluster:
        program = training(planned=["1@5:mean:SIGKILL"])
        job = cluster.start("srun", "--no-kill", "-N2", "-n3", sys.executable, *program, **SECRET)
        text = job.communicate(timeout=PATIENCE_S)[0]
    assert job.returncode == 128 + 9, text
    assert text.count("\nsamestep.PeerLostError: ") == 2
    assert not results(text)

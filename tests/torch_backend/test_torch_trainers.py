"""Libraries that train through torch.distributed: their scripts run over this backend unchanged. Optional."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from running import script

pytest.importorskip("torch")

JOB = Path(__file__).with_name("trainer_jobs.py")


def needs(trainer):
    modules = {"lightning": ("lightning", "pytorch_lightning")}.get(trainer, (trainer,))
    if not any(map(importlib.util.find_spec, modules)):
        pytest.skip(f"pip install {modules[-1].replace('_', '-')}")


def run(script, *arguments, env, folder):
    """What two ranks of the script print."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "samestep",
        "run",
        "--raw",
        "-n",
        "2",
        "--timeout",
        "200",
    ]
    ended = subprocess.run(
        [*command, str(script), *arguments],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["lightning", "accelerate"])
def test_a_language_model_ends_where_it_does_over_gloo(trainer, environment, tmp_path):
    needs(trainer)
    printed = run(JOB, trainer, env=environment, folder=tmp_path)
    found = [line.split() for line in printed.splitlines() if line.startswith(("samestep ", "gloo "))]
    assert sorted(name for name, *_ in found) == ["gloo", "gloo", "samestep", "samestep"]
    for backend in ("samestep", "gloo"):
        assert len({tuple(line) for line in found if line[0] == backend}) == 1  # all ranks are equal
    losses = {name: float(loss) for name, loss, *_ in found}
    assert losses["samestep"] == pytest.approx(losses["gloo"], rel=1e-6)
    assert losses["samestep"] < 0.9 * float(found[0][2])


PROGRAM = script("torch_backend/train_with_accelerate")


@pytest.mark.slow
def test_an_unchanged_script_of_accelerate(environment, tmp_path):
    """Accelerate itself names gloo; a variable puts samestep in its place."""
    needs("accelerate")
    printed = {}
    for replace, backend in (("", "gloo"), ("1", "samestep")):
        text = run(PROGRAM, env=environment | {"SAMESTEP_REPLACE_GLOO": replace}, folder=tmp_path)
        lines = [line.split() for line in text.splitlines() if line.startswith("<")]
        assert [line[-2] for line in lines] == [backend, backend]
        assert lines[0] == lines[1]
        printed[backend] = [float(word) for word in lines[0][1:-2]]
    assert printed["samestep"] == pytest.approx(printed["gloo"], rel=1e-6)

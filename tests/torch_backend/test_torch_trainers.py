"""Libraries that train through torch.distributed: their scripts run over this backend unchanged. Optional."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

JOB = Path(__file__).with_name("trainer_jobs.py")


@pytest.mark.parametrize("trainer", ["lightning", "accelerate"])
def test_a_language_model_ends_where_it_does_over_gloo(trainer, environment, tmp_path):
    modules = {"lightning": ("lightning", "pytorch_lightning")}.get(trainer, (trainer,))
    if not any(map(importlib.util.find_spec, modules)):
        pytest.skip(f"pip install {modules[-1].replace('_', '-')}")
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
        [*command, str(JOB), trainer],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = [line.split() for line in ended.stdout.splitlines() if line.startswith(("samestep ", "gloo "))]
    assert sorted(name for name, *_ in told) == ["gloo", "gloo", "samestep", "samestep"]
    for backend in ("samestep", "gloo"):
        assert len({tuple(line) for line in told if line[0] == backend}) == 1  # all ranks are equal
    losses = {name: float(loss) for name, loss, *_ in told}
    assert losses["samestep"] == pytest.approx(losses["gloo"], rel=1e-6)
    assert losses["samestep"] < 0.9 * float(told[0][2])

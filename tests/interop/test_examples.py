"""The examples do what their first lines say: they learn, ranks stay equal, and agree with one process."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import RUN_COMMAND
from samestep.gpu import discovery

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "digits": ("sklearn", "tqdm", "matplotlib"),
    "digits_torch": ("sklearn", "tqdm", "torch"),
    "digits_jax": ("sklearn", "tqdm", "jax", "optax"),
    "digits_cupy": ("sklearn",),
    "fluxmpi_quickstart": (),
    "jax_shard_map": ("jax",),
    "tutorial/one_process": ("sklearn", "torch"),
    "tutorial/several_processes": ("sklearn", "torch"),
}


def output(name: str, n_ranks: int, cwd: Path, *arguments: str) -> str:
    """What the example prints on `n_ranks` ranks; skips if it lacks a library."""
    lacking = [module for module in NEEDS[name] if importlib.util.find_spec(module) is None]
    if lacking:
        pytest.skip(f"{name}.py needs {', '.join(lacking)}")
    command = [
        *RUN_COMMAND,
        "--raw",
        "-n",
        str(n_ranks),
        str(EXAMPLES / f"{name}.py"),
        *arguments,
    ]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "n_ranks"), [("digits", 1), ("digits", 3), ("digits_torch", 2), ("digits_jax", 2)]
)
def test_digits(name: str, n_ranks: int, tmp_path: Path) -> None:
    check_digits(output(name, n_ranks, tmp_path), n_ranks)
    if name == "digits":
        assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "n_ranks"), [("one_process", 1), ("several_processes", 3)])
def test_the_tutorial(name: str, n_ranks: int, tmp_path: Path) -> None:
    printed = output(f"tutorial/{name}", n_ranks, tmp_path)
    losses = [float(loss) for loss in re.findall(r"epoch (?:0|9): loss (\S+)", printed)]
    assert len(losses) == 2 * n_ranks
    assert max(losses[n_ranks:]) < min(losses[:n_ranks]) / 2
    assert (tmp_path / "digits.pt").is_file()


def test_digits_on_a_device(tmp_path: Path) -> None:
    lacking = discovery.cuda_devices()
    if not lacking.count:
        pytest.skip(f"digits_cupy.py and digits_torch.py --device cuda need a device: {lacking.detail}")
    if importlib.util.find_spec("cupy") is not None:
        check_agreement(output("digits_cupy", 1, tmp_path), least=0.9)
    check_digits(output("digits_torch", 1, tmp_path, "--device", "cuda"), 1)


def check_digits(printed: str, n_ranks: int) -> None:
    assert f"ranks {n_ranks}," in printed
    check_agreement(printed, least=0.96)


def check_agreement(printed: str, *, least: float) -> None:
    assert float(re.findall(r"test accuracy ([\d.]+)", printed)[-1]) > least
    assert "bitwise equal on all ranks: True" in printed
    assert float(re.findall(r"joined batches: (\S+)", printed)[-1]) <= 1e-5


def test_digits_with_arrays_of_the_host_for_those_of_cupy(tmp_path: Path) -> None:
    check_agreement(output("digits_cupy", 3, tmp_path, "--numpy"), least=0.9)


def test_the_quick_start_of_fluxmpi_learns(tmp_path: Path) -> None:
    printed = output("fluxmpi_quickstart", 2, tmp_path)
    for rank in range(2):
        losses = [float(loss) for loss in re.findall(rf"\[{rank} / 2\] Epoch \d+: Loss (\S+)", printed)]
        assert len(losses) == 100
        assert losses[-1] < 0.1 * losses[0]


def test_a_script_of_2019_starts_its_ranks_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "spawn_2019.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "slope 2.00, intercept -1.00\nbitwise equal on all ranks: True\n", done.stderr


@pytest.mark.slow
def test_jax_shard_map(tmp_path: Path) -> None:
    assert "on 3 devices: the same as on one" in output("jax_shard_map", 3, tmp_path)

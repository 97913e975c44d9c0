"""The programs of the recipes print what their pages promise, on two and on three ranks."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from running import RUN_COMMAND

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
PRINTED = {  # the line of rank 0, by recipe; {n} ranks
    "accumulate": r"weights \[1. 2.\]: each step had the gradient of all 100 items",
    "batchnorm": r"equal on all ranks after 100 batches, loss \S+",
    "broadcast_object": r"digits: rate 0.1 on {n} ranks",
    "clip": r"norm 7.52 is clipped to 1.0\nslope 20.00, intercept 3.00",
    "early_stopping": r"all ranks stop after \d+ epochs, best loss \S+",
    "evaluate": r"accuracy 0.8911 over 101 items",
    "gpu_host": r"\d\d hits in \d\d items, rate 0.1, stop: False",
    "learning_rate": r"ranks {n}, batch 24, rate 0.10, steps 100",
    "mixed_precision": r"skipped 1 step on all ranks, largest error \S+",
    "rank_0": r"norm 3.0, saved model.npz",
}
TORCH = {"batchnorm", "gpu_host", "mixed_precision"}


def output(name: str, n_ranks: int, cwd: Path, *arguments: str) -> str:
    """What the recipe prints on `n_ranks` ranks; skips if it needs torch, and there is none."""
    if name in TORCH and importlib.util.find_spec("torch") is None:
        pytest.skip(f"{name}.py needs torch")
    command = [*RUN_COMMAND, "--raw", "-n", str(n_ranks), str(RECIPES / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PRINTED)
def test_a_recipe_runs(name: str, n_ranks: int, tmp_path: Path) -> None:
    pattern = PRINTED[name].format(n=n_ranks)
    assert re.search(f"^{pattern}$", output(name, n_ranks, tmp_path), re.MULTILINE)


def test_each_recipe_is_tried_and_has_a_page() -> None:
    programs = {path.stem for path in RECIPES.glob("*.py")}
    assert programs == {*PRINTED, "resume"}
    pages = ROOT / "docs" / "recipes"
    if not pages.is_dir():
        pytest.skip("the pages are not part of this tree")
    shown = re.findall(r'"examples/recipes/(\w+)\.py"', "".join(p.read_text() for p in pages.glob("*.md")))
    assert sorted(shown) == sorted(programs)


def test_a_job_that_was_killed_resumes_at_another_size_with_the_same_bits(tmp_path: Path) -> None:
    (whole := tmp_path / "whole").mkdir()
    expected = output("resume", 1, whole)
    assert re.fullmatch(r"step 16, weights \[0.995 1.993\], hash [0-9a-f]{32}\n", expected)
    assert "step 16" not in output("resume", 2, tmp_path, "--stop", "7")
    resumed = output("resume", 3, tmp_path)
    assert resumed.count("continues from step 5\n") == 3
    assert resumed.endswith(expected)


@pytest.mark.slow
def test_the_rate_grows_with_the_batch(tmp_path: Path) -> None:
    printed = output("learning_rate", 2, tmp_path, "--keep", "share")
    assert "ranks 2, batch 48, rate 0.20, steps 50\n" in printed


def test_the_image_has_all_that_the_package_is_built_of() -> None:
    image = (ROOT / "examples/docker/Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (?!--)(.+) \S+$", image, re.M) for word in line.split()}
    copied.discard("$PROGRAM")
    default = re.findall(r"^ARG PROGRAM=(\S+)$", image, re.M)
    assert all((ROOT / name).exists() for name in [*copied, *default])
    assert {"pyproject.toml", "CMakeLists.txt", "csrc", "python"} <= copied

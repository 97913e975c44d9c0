"""What other files say of the package is what pyproject.toml says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "pyproject.toml"
RECIPE = ROOT / "packaging" / "conda" / "recipe.yaml"


def one(pattern, text):
    (found,) = re.findall(pattern, text, re.M)
    return found


@pytest.mark.skipif(not RECIPE.is_file(), reason="the recipe is not part of this tree")
def test_the_recipe_of_conda_agrees():
    project, recipe = PROJECT.read_text(), RECIPE.read_text()
    assert one(r'^  version: "(.*)"$', recipe) == one(r'^version = "(.*)"$', project)
    assert one(r"^  summary: (.*)$", recipe) == one(r'^description = "(.*)"$', project)
    needed = re.findall(r'"([^"]+)"', one(r"^dependencies = \[(.*)\]$", project))
    build = re.findall(r'"([^"]+)"', one(r"^requires = \[(.*)\]$", project))
    run = re.findall(r"^    - (.*)$", recipe.partition("  run:\n")[2].partition("\ntests:")[0], re.M)
    host = re.findall(r"^    - (.*)$", recipe.partition("  host:\n")[2].partition("  run:")[0], re.M)
    assert run == ["python", *(name.replace(">=", " >=") for name in needed)]
    assert host == ["python", "pip", *(name.replace(">=", " >=") for name in build)]
    assert one(r"^      - samestep = (.*)$", recipe) == one(r'^samestep = "(samestep.*main)"$', project)

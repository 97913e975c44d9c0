"""What other files say of the package is what pyproject.toml says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import samestep as ss

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "pyproject.toml"
RECIPE = ROOT / "packaging" / "conda" / "recipe.yaml"


def one(pattern, text):
    (found,) = re.findall(pattern, text, re.M)
    return found


@pytest.mark.skipif(not RECIPE.is_file(), reason="the recipe is not part of this tree")
def test_the_recipe_of_conda_agrees():
    project, recipe = PROJECT.read_text(), RECIPE.read_text()
    assert ss.__version__ == one(r'^version = "(.*)"$', project)
    assert one(r'^  version: "(.*)"$', recipe) == one(r'^version = "(.*)"$', project)
    assert one(r"^  summary: (.*)$", recipe) == one(r'^description = "(.*)"$', project)
    needed = re.findall(r'"([^"]+)"', one(r"^dependencies = \[(.*)\]$", project))
    build = re.findall(r'"([^"]+)"', one(r"^requires = \[(.*)\]$", project))
    run = re.findall(r"^    - (.*)$", recipe.partition("  run:\n")[2].partition("\ntests:")[0], re.M)
    host = re.findall(r"^    - (.*)$", recipe.partition("  host:\n")[2].partition("  run:")[0], re.M)
    assert run == ["python", *(name.replace(">=", " >=") for name in needed)]
    assert host == ["python", "pip", *(name.replace(">=", " >=") for name in build)]
    assert one(r"^      - samestep = (.*)$", recipe) == one(r'^samestep = "(samestep.*main)"$', project)


ADDRESSES = ROOT / ".ci" / "project_urls.py"
WORKFLOW = ROOT / ".github" / "workflows" / "wheels.yml"
in_the_repository = pytest.mark.skipif(not ADDRESSES.is_file(), reason="the release is not part of this tree")


def write_urls(repository, project):
    command = [sys.executable, str(ADDRESSES), repository, str(project)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@in_the_repository
def test_a_release_names_the_repository_that_it_comes_from(tmp_path):
    project = tmp_path / "pyproject.toml"
    project.write_text(PROJECT.read_text())
    first, second = "https://forge.example/owner/samestep", "https://forge.example:8443/fork.of/same_step"
    for repository in (first, second, second):  # what was written before is replaced
        assert write_urls(repository, project).returncode == 0
        text = project.read_text()
        urls = dict(re.findall(r'^(\w+) = "(.*)"$', one(r"^\[project.urls\]\n((?:.+\n)+)", text), re.M))
        assert urls == {
            "Source": repository,
            "Issues": f"{repository}/issues",
            "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
            "Documentation": f"{repository}/blob/HEAD/docs/index.md",
        }
        assert re.sub(r"^\[project.urls\]\n(?:.+\n)+\n", "", text, flags=re.M) == PROJECT.read_text()
    for url in urls.values():  # what they point at exists here
        path = url.partition("/blob/HEAD/")[2]
        assert not path or (ROOT / path).is_file()


@in_the_repository
@pytest.mark.parametrize(
    "repository", ["", "/", "https://forge.example", "http://forge.example/a/b", 'https://x/a/b"']
)
def test_what_is_no_repository_is_not_written(repository, tmp_path):
    project = tmp_path / "pyproject.toml"
    project.write_text(PROJECT.read_text())
    done = write_urls(repository, project)
    assert done.returncode == 1
    assert "not the address of a repository" in done.stderr
    assert project.read_text() == PROJECT.read_text()


@in_the_repository
def test_every_job_that_builds_writes_the_addresses_first():
    jobs = re.split(r"^  (?=\w+:$)", WORKFLOW.read_text().partition("\njobs:\n")[2], flags=re.M)
    builds = [job for job in jobs if "cibuildwheel" in job or "run build" in job]
    assert len(builds) == 2
    for job in builds:
        before = re.split("cibuildwheel|run build", job)[0]
        assert 'project_urls.py "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY"' in before
    assert "[project.urls]" not in PROJECT.read_text()

"""The table of environment variables: whole, documented, and what becomes of names that are not in it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from samestep import _settings
from samestep._util import unknown_settings

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\bSAMESTEP_[A-Z0-9_]*[A-Z0-9]\b")
WRONG, RIGHT = "SAMESTEP_TIMOUT", "SAMESTEP_TIMEOUT"
TYPO = {WRONG: "5"}


def names_in(*files):
    return {name for file in files for name in NAME.findall(file.read_text(errors="replace"))}


def sources():
    """All files that may name a variable, but the table and this test."""
    own = (ROOT / "python" / "samestep" / "_settings.py", Path(__file__).resolve())
    folders = [ROOT / name for name in ("python", "tests", "benchmarks", "examples", "docs")]
    files = [file for folder in folders for end in ("py", "md", "sh") for file in folder.rglob(f"*.{end}")]
    return [file for file in files if file.resolve() not in own]


@pytest.mark.skipif(not (ROOT / "CMakeLists.txt").is_file(), reason="the sources are not part of this tree")
def test_the_table_has_every_name_in_the_tree_and_no_other():
    of_builds = names_in(ROOT / "CMakeLists.txt")
    used = names_in(*sources()) - of_builds
    in_core = {
        name
        for file in (ROOT / "csrc").rglob("*.cpp")
        for name in re.findall(r'getenv\("(SAMESTEP_\w+)"', file.read_text())
    }
    assert used | in_core == {*_settings.SETTINGS, *_settings.OF_TESTS}


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the pages are not part of this tree")
def test_the_page_on_launching_holds_the_table():
    made = _settings.markdown()
    found = (ROOT / "docs" / "launching.md").read_text()
    assert made in found, "put `_settings.markdown()` into docs/launching.md"
    assert found.count("| `SAMESTEP_") == len(_settings.SETTINGS)


def test_the_nearest_name_is_the_one_that_was_meant():
    env = {WRONG: "", "SAMESTEP_SECRETS": "", "SAMESTEP_QQQQ": "", RIGHT: "5", "OTHER": ""}
    nearest = {WRONG: RIGHT, "SAMESTEP_SECRETS": "SAMESTEP_SECRET", "SAMESTEP_QQQQ": ""}
    assert unknown_settings.unknown(env) == nearest
    assert unknown_settings.warning("SAMESTEP_QQQQ", "").endswith(
        "no such variable; docs/launching.md lists all"
    )


def test_each_is_warned_about_once_and_not_after_the_launcher(monkeypatch):
    monkeypatch.setattr(unknown_settings, "_warned", set())
    said = []
    assert unknown_settings.warn_unknown(said.append, TYPO) == [WRONG]
    assert unknown_settings.warn_unknown(said.append, TYPO) == [WRONG]
    assert unknown_settings.warn_unknown(
        said.append, {"SAMESTEP_QQQQ": "", _settings.REPORTED: "SAMESTEP_QQQQ"}
    )
    assert said == [f"{WRONG} is set, but there is no such variable; did you mean {RIGHT}?"]


@pytest.mark.parametrize("launched", [False, True])
def test_initialize_and_the_launcher_warn_once_for_a_job(launched, tmp_path):
    (tmp_path / "script.py").write_text(
        "import samestep as ss\nss.initialize()\nss.finalize()\nss.initialize()"
    )
    run = ["-m", "samestep", "run", "-n", "2"] if launched else []
    line = [sys.executable, *run, str(tmp_path / "script.py")]
    done = subprocess.run(
        line, env=os.environ | TYPO, capture_output=True, text=True, check=False, timeout=60
    )
    said = f"{WRONG} is set, but there is no such variable; did you mean {RIGHT}?\n"
    assert (done.returncode, done.stderr) == (0, f"samestep run: {said}" if launched else said)

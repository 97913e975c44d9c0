#!/usr/bin/env python3
"""Breaks what each step of .ci/run checks, in a scratch copy, and expects that step to fail.

    broken.py            all
    broken.py NAME...    these
    broken.py --list
    broken.py --work FOLDER NAME...    keeps tools and compiled objects there for the next time

A row passes if the step that it names fails and its output gives the reason. The rows share tools and compiled objects:
a row of lint takes seconds, one that builds the package a minute or two, and one that comes after other steps as long
as these: "tsan" and "mpich" some minutes.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from breaks import BREAKS, Break

ROOT = Path(__file__).resolve().parents[1]
FRESH = (
    "builds",
    "dist*",
    "demo",
    "test",
    "smoke",
    "example",
    "full.installed",
    "kit-tree",
    "newest-jax",
    "wheel-*",
    "wheels/*",
    "build-model",
    "site",
    "*.log",
)


class Scratch:
    """A clone of this repository, broken in one way after the other, and what `.ci/run` has built of it."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.work = folder / "clone", folder / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        if self.clone.exists():
            shutil.rmtree(self.clone)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.clone)], check=True)
        self._base = self._git("rev-parse", "HEAD").strip()

    def _git(self, *words: str) -> str:
        who = ["-c", "user.name=broken", "-c", "user.email=broken@localhost"]
        done = subprocess.run(
            ["git", "-C", str(self.clone), *who, *words], check=True, capture_output=True, text=True
        )
        return done.stdout

    def reset(self) -> None:
        """Keeps venvs of tools and what compilers have made; not the package, nor what has to be empty at first."""
        self._git("reset", "--quiet", "--hard", self._base)
        for pattern in FRESH:
            for path in self.work.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for python in self.work.glob("*/bin/python"):
            subprocess.run([python, "-m", "pip", "uninstall", "-qqy", "samestep"], check=False)

    def run(self, name: str, found: Break) -> subprocess.CompletedProcess[str]:
        """Breaks it, and runs the step."""
        self._git("commit", "--quiet", "-am", name)
        return subprocess.run(
            [self.clone / ".ci/run", found.step],
            env={**os.environ, "CI_WORK": str(self.work), "PYTEST_ADDOPTS": "" if found.whole else "-x"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


def check(name: str, found: Break, scratch: Scratch) -> str:
    """What is wrong with the check of this row; "" if it failed as it should."""
    scratch.reset()
    file = scratch.clone / found.file
    text = file.read_text(encoding="utf-8")
    changed, n = (
        re.subn(found.old, found.new, text, count=1, flags=re.MULTILINE)
        if found.old
        else (text + found.new, 1)
    )
    if not n:
        return f"{found.file} has no {found.old!r}: this row has to be brought up to date"
    file.write_text(changed, encoding="utf-8")
    done = scratch.run(name, found)
    if done.returncode == 0:
        return f"`.ci/run {found.step}` passed"
    if f"FAILED: {found.fails}" not in done.stdout:
        return f"`.ci/run {found.step}` failed elsewhere:\n{done.stdout[-2000:]}"
    if not re.search(found.why, done.stdout, re.MULTILINE):
        return f"`.ci/run {found.step}` does not say {found.why!r}:\n{done.stdout[-2000:]}"
    return ""


def main() -> int:
    """Check the rows that were asked for; 1 if one did not fail as it should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*BREAKS, []], metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="kept, and used again")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{name:22} {found.step:8} {found.file}" for name, found in BREAKS.items()))
        return 0
    bad = 0
    with tempfile.TemporaryDirectory(prefix="samestep-broken-") as folder:
        scratch = Scratch((args.work or Path(folder)).absolute())
        for name in args.names or BREAKS:
            begin = time.monotonic()
            problem = check(name, BREAKS[name], scratch)
            bad += bool(problem)
            print(
                f"{name}: {problem or 'fails, as it should'} ({time.monotonic() - begin:.0f} s)", flush=True
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

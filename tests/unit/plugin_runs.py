"""Runs pytest, with the plugin, on small test files."""

import os
import subprocess
import sys

from samestep.launch import mpirun


def run(pytester, body, *arguments, n=0, **variables):
    """(exit code, output) of pytest on a file with this body; under mpirun if n is not 0."""
    pytester.makepyfile(test_it=body)
    return run_all(pytester, *arguments, n=n, **variables)


def run_all(pytester, *arguments, n=0, **variables):
    """(exit code, output) of pytest on the files that are there, with these variables in its environment."""
    # hypothesis takes a second to import.
    without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    argv = [sys.executable, "-m", "pytest", *without, *arguments]
    extra = {}
    if n:
        argv, extra = mpirun.command(n, argv)
    env = os.environ | extra | {"COLUMNS": "160"} | variables
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ended = subprocess.run(argv, env=env, cwd=pytester.path, timeout=300, check=False, **out)
    return ended.returncode, ended.stdout

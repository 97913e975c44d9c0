"""Folders for all that a run leaves behind, as Open MPI does where ranks are killed; its end removes them."""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

_OURS = re.compile(r"samestep")
_SHARED = Path("/dev/shm")
_VARIABLES = ("TMPDIR", "PYTEST_DEBUG_TEMPROOT", "OMPI_MCA_btl_sm_backing_directory")
_BYTECODE = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")


class Leftovers:
    """For as long as it is open, temporary files of this process and of all that it starts lie in its folders.

    Folders of pytest's `tmp_path`, which are for people who look for the cause of a failure, stay where they were.
    """

    def __init__(self):
        self._before = {name: os.environ.get(name) for name in (*_VARIABLES, *_BYTECODE)}
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        self._folders = [self._make(tempfile.gettempdir(), "TMPDIR")]
        if os.access(_SHARED, os.W_OK):
            self._folders.append(self._make(_SHARED, "OMPI_MCA_btl_sm_backing_directory"))
        tempfile.tempdir = None  # so that it is asked for again
        self._prefix = sys.pycache_prefix
        self._keeps_bytecode = sys.dont_write_bytecode
        if self._keeps_bytecode:
            self._keep_bytecode(str(self._folders[0] / "bytecode"))

    @staticmethod
    def _keep_bytecode(folder):
        """Where none may lie beside the sources, as in many containers. Without any, each of the hundreds of processes
        compiles what it imports, and each rank rewrites the assertions of all test files."""
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # it may have been `python -B`
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = folder
        sys.dont_write_bytecode = False

    @staticmethod
    def _make(where, variable):
        path = Path(tempfile.mkdtemp(prefix="tests-", dir=where))
        path.chmod(0o1777)  # some tests are of several users
        os.environ[variable] = str(path)
        return path

    def found(self):
        """Names of files of the package that tests have left."""
        names = [path.name for folder in self._folders for path in folder.iterdir()]
        return sorted(name for name in names if _OURS.match(name))

    def remove(self):
        if self._keeps_bytecode:
            sys.dont_write_bytecode, sys.pycache_prefix = True, self._prefix
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = None

"""What the entry point for torch does beside registering the backend, without torch."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from _samestep_torch import gloo
from running import program
from samestep._util import mpi_library


@pytest.mark.parametrize(
    ("given", "started"),
    [
        (("gloo",), "samestep"),
        (("GLOO",), "samestep"),
        (("nccl",), "nccl"),
        (("cpu:gloo,cuda:nccl",), "cpu:gloo,cuda:nccl"),
        ((), None),
    ],
)
def test_only_gloo_alone_is_replaced(given, started):
    def init_process_group(backend=None, init_method=None, *, rank=-1):
        return backend, init_method, rank

    dist = SimpleNamespace(init_process_group=init_process_group, distributed_c10d=SimpleNamespace())
    gloo.replace(dist, "samestep")
    assert dist.distributed_c10d.init_process_group is dist.init_process_group
    assert dist.init_process_group(*given, rank=3) == (started, None, 3)
    if given:
        assert dist.init_process_group(given[0], "file:///a") == (started, "file:///a", -1)
        assert dist.init_process_group(backend=given[0]) == (started, None, -1)


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError"])
def test_without_an_mpi_library_mpi4py_cannot_be_imported(error):
    pytest.importorskip("mpi4py", "4.1")
    env = os.environ | {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    command = [sys.executable, *program("unit/mpi4py_imports", "import_without_a_library", error)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "cannot load MPI library" in ended.stdout
    assert "/nowhere/libmpi.so" in ended.stdout


def test_an_mpi_library_is_found_as_ever():
    if not mpi_library.probe().path:
        pytest.skip(mpi_library.probe().detail)
    command = [sys.executable, *program("unit/mpi4py_imports", "import_with_a_library")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "False\n", ended.stderr

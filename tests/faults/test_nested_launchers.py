"""A launcher inside a rank of another one: the inner one says who the ranks are, whichever kinds the two are."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from running import RUN_COMMAND, program
from samestep.launch import mpirun

PATIENCE_S = 120


def by_mpirun(n, *words):
    try:
        return mpirun.command(n, [sys.executable, *words])[0]
    except mpirun.LaunchError as error:
        pytest.skip(str(error))


def by_samestep(n, *words):
    return [*RUN_COMMAND, "--raw", "-n", str(n), *words]


def by_samestep_over_mpi(n, *words):
    by_mpirun(n)
    return [*RUN_COMMAND, "--raw", "--mpi", "-n", str(n), *words]


def by_launch_module(n, *words):
    return [sys.executable, "-m", "samestep.distributed.launch", "--use_env", f"--nproc_per_node={n}", *words]


def by_torchrun(n, *words):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", *words]


def run_inside(outer, n_outer, inner, **variables):
    """All lines that `inner`, a command that begins with this Python, prints inside each rank of `outer`."""
    small = mpirun._SMALL_MACHINE | {"OMP_NUM_THREADS": "1"}
    assert inner[0] == sys.executable
    done = subprocess.run(
        outer(n_outer, *program("faults/nested_command", "run", inner)),
        env={**os.environ, **small, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def inner_by_python(inner, n):
    """`mpirun` is no Python: a command that starts with one and becomes it."""
    line = inner(n, *program("faults/nested", "world"))
    code = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
    return line if line[0] == sys.executable else [sys.executable, "-c", code, *line]


def ranks_in(text):
    return sorted(json.loads(line) for line in re.findall(r"\[\d+, \d+, [\d.]+\]", text))


def expected(n, times):
    return sorted([rank, n, float(n)] for rank in range(n) for _ in range(times))


def some_slow(*fast, slow):
    """Each launcher takes seconds to start; one of each kind runs by default."""
    cases = [*fast, *(pytest.param(one, marks=pytest.mark.slow) for one in slow)]
    return pytest.mark.parametrize("inner", cases, ids=lambda f: getattr(f, "__name__", None))


@pytest.mark.parametrize("n_outer", [1, pytest.param(2, marks=pytest.mark.slow)])
@some_slow(by_samestep, slow=[by_launch_module, by_torchrun])
def test_ranks_inside_a_rank_of_mpi(inner, n_outer):
    """With two, numbers of the inner job are those of the outer one for some ranks, but not for others."""
    found = run_inside(by_mpirun, n_outer, inner_by_python(inner, 2))
    assert ranks_in(found) == expected(2, n_outer)


@pytest.mark.parametrize("act", ["launch", "spawn"])
def test_ranks_that_a_script_starts_inside_a_rank_of_mpi(act):
    if act == "launch":
        pytest.importorskip("cloudpickle")  # its function is in the script
    found = run_inside(by_mpirun, 1, [sys.executable, *program("faults/nested", act, 2)])
    assert ranks_in(found) == expected(2, 1)


@some_slow(by_mpirun, slow=[by_samestep_over_mpi])
def test_ranks_of_mpi_inside_a_rank_without_it(inner):
    found = run_inside(by_samestep, 1, inner_by_python(inner, 3))
    assert ranks_in(found) == expected(3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [by_samestep, by_mpirun, by_samestep_over_mpi], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "outer", [by_samestep, by_torchrun, by_mpirun, by_samestep_over_mpi], ids=lambda f: f.__name__
)
def test_every_pair(outer, inner):
    if outer in {by_mpirun, by_samestep_over_mpi} and inner is by_mpirun:
        pytest.skip("mpirun of Open MPI refuses to run inside its own ranks")
    assert ranks_in(run_inside(outer, 2, inner_by_python(inner, 2))) == expected(2, 2)


def test_mpi_inside_a_job_of_mpi_whose_ranks_are_others_is_refused():
    """MPI would take each process for the one rank of the outer job."""
    line = by_samestep(2, *program("faults/nested", "be_refused", "mpi"))
    found = run_inside(by_mpirun, 1, line)
    assert found.count("refused: ") == 2
    assert "samestep run (WORLD_SIZE=2)" in found


def test_a_size_that_contradicts_the_launcher_is_refused_on_all_ranks():
    found = run_inside(
        by_mpirun, 2, [sys.executable, *program("faults/nested", "be_refused", None)], WORLD_SIZE="3"
    )
    assert (
        found.count("refused: initialize: variable WORLD_SIZE is 3, but the launcher has started 2 ranks")
        == 2
    )

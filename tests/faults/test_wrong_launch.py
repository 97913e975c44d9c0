"""Started by a launcher that this MPI library does not know: caught at initialize, with the cure."""

import re

import jobs
import pytest
from running import program

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "2"}


@pytest.mark.parametrize(
    ("variables", "backend"),
    [
        (OPEN_MPI, None),
        *(
            pytest.param(variables, backend, marks=pytest.mark.slow)
            for variables, backend in [
                (MPICH, "mpi"),
                (OPEN_MPI, "mpi"),
                (OPEN_MPI, "native"),
                (MPICH, None),
                (MPICH, "native"),
            ]
        ),
    ],
)
def test_the_launcher_says_four_and_the_world_is_one(variables, backend):
    if "PMI_SIZE" in variables and backend != "native":
        pytest.importorskip("mpi4py")
    ended = jobs.run(0, program("faults/start", "be_refused", backend), **variables)
    assert re.search(r"^refused:", ended.text, re.M), ended.text  # mpi4py may warn before
    assert "4" in ended.text
    assert "mpirun" in ended.text
    assert re.search(r"\b(1|one)\b", ended.text)

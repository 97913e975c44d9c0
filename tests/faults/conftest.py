"""For tests of `samestep run`, and of ranks without a launcher."""

import pytest
from launching import WAYS, Run
from native_ranks import Ranks


@pytest.fixture(params=WAYS)
def launcher(request):
    return request.param


@pytest.fixture
def begin(tmp_path):
    """Starts `samestep run` on a program; a process that is left of it after the test is an error."""
    runs = []

    def start(launcher, program, *words, **options):
        runs.append(Run(tmp_path, launcher, program, *words, **options))
        return runs[-1]

    yield start
    left = [run.left() for run in runs]
    for run in runs:
        run.end()
    assert left == [[] for _ in runs]


@pytest.fixture(params=["shm", "tcp"])
def ranks(tmp_path, request):
    """Starts ranks of a program over the transport of the parameter; they end with the test."""
    made = []

    def start(program, n):
        made.append(Ranks(tmp_path, program, n, request.param))
        return made[-1]

    yield start
    for each in made:
        each.end()
